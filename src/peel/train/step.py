"""A training step, with gradient accumulation, DDP, compilation and CUDA graphs."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.batch import Batch
from ..errors import ConfigError, OutOfMemoryError, RunError
from ..graph.layers import NORMS
from ..utils.rng import get_rng_state, set_rng_state
from .engine import Engine, is_out_of_memory
from .objective import Objective, describe, explain_failure
from .recipe import Recipe
from .task import OptimizerFactory

log = logging.getLogger("peel")

#: Eager steps before the capture of a CUDA graph: the allocator and cuDNN settle meanwhile.
WARM_UP_STEPS = 5

_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters

#: DDP's option to broadcast buffers before each forward pass; torch 2.15 renamed it.
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers"


class _LossModule(nn.Module):
    """The objective as a module, so that DDP and torch.compile cover it together with the model."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, *batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        losses = self.objective(self.model, Batch(*batch))
        return losses.total, losses.terms


class _BufferSnapshot:
    """Snapshot of the buffers. Restored when a step is retried, since its forward pass updated batch norm."""

    def __init__(self, module: nn.Module) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self.pairs = [(buffers, [buffer.clone() for buffer in buffers]) for buffers in by_dtype.values()]

    def save(self) -> None:
        # Private, without a public form: one copy per buffer takes as long as a small forward pass.
        for buffers, copies in self.pairs:
            torch._foreach_copy_(copies, buffers)

    def restore(self) -> None:
        for buffers, copies in self.pairs:
            torch._foreach_copy_(buffers, copies)


class _CudaGraph:
    """Captures a step and replays it: small networks are bound by kernel launches otherwise."""

    def __init__(self, step: Callable[[Batch], None]) -> None:
        self.step = step
        self.reset()

    def reset(self) -> None:
        """Free the graph and its buffers; the next calls warm up again."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: Batch | None = None
        self.stream: torch.cuda.Stream | None = None
        self.warm_up_steps = 0

    @property
    def needs_capture(self) -> bool:
        return self.graph is None and self.warm_up_steps == WARM_UP_STEPS

    def capture(self, batch: Batch) -> None:
        """Record the step. Nothing is computed meanwhile."""
        self.static = batch.clone()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that pins memory, may use CUDA during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step(self.static)
        self.graph = graph

    def run(self, batch: Batch) -> None:
        if self.graph is not None and self.static is not None:
            self.static.fill(batch)
            self.graph.replay()
            return
        # A capture requires that the warm-up steps ran on a side stream.
        self.stream = self.stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):
                self.step(batch)
        finally:
            # Also after an out-of-memory error: pending work must not write to buffers that are restored.
            torch.cuda.current_stream().wait_stream(self.stream)
        self.warm_up_steps += 1


class Sums(dict[str, Tensor]):
    """Loss, terms and top-1, summed over the steps of an epoch."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(loss=torch.zeros((), dtype=torch.float64, device=device))

    @torch.no_grad()
    def add(self, losses: Mapping[str, Tensor], weight: float) -> None:
        for name, value in losses.items():
            if name not in self:
                self[name] = torch.zeros((), dtype=torch.float64, device=value.device)
            self[name].add_(value.detach() * weight)


class TrainStep:
    """Runs training steps. Out of memory, it splits batches into more micro-batches and tries again."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        recipe: Recipe,
        engine: Engine,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        self.engine = engine
        self.loss: nn.Module = _LossModule(model, objective)
        #: `loss`, or its compiled form.
        self.forward: Callable[..., Any] = self.loss
        self.is_compiled = self.has_run_compiled = self.cannot_compile = False
        self.graph = _CudaGraph(self._compute) if engine.cuda_graphs and engine.world.size == 1 else None
        self.optimizer: torch.optim.Optimizer
        if optimizer is None:
            self.optimizer = make_sgd(model, recipe, engine, is_graphed=self.graph is not None)
            self.rates = [1.0] * len(self.optimizer.param_groups)
        else:
            self.optimizer = _user_optimizer(model, optimizer)
            # The learning rate of the recipe is a factor of those that the optimizer was made with.
            self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.buffers = _BufferSnapshot(self.loss)
        self.accumulation_steps = engine.accumulation_steps
        self.sums = Sums(engine.device)

    def __call__(self, batch: Batch, lr: float, progress: float = 0.0) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * lr)
            else:
                group["lr"] = rate * lr
        while True:
            if self.graph is None or self.graph.graph is None:
                self.buffers.save()
            try:
                self._run(batch)
                self.has_run_compiled = self.is_compiled
                return
            except Exception as error:
                if is_out_of_memory(error):
                    self._double_accumulation(batch.size)
                elif self.is_compiled and not self.has_run_compiled:
                    self._stop_compiling(error)
                else:
                    self._explain(error, batch.size)
                    raise
            # Weights, momentum and sums have not changed yet.
            self.buffers.restore()

    def _run(self, batch: Batch) -> None:
        if self.engine.world.size > 1 and not isinstance(self.loss, DistributedDataParallel):
            self.loss = self._wrap_in_ddp(batch)
            self.forward = _compiled(self.loss) if self.is_compiled else self.loss
        if self.graph is not None and self.graph.needs_capture:
            try:
                self.graph.capture(batch)
            except torch.OutOfMemoryError:
                # A graph has memory of its own. The steps before fitted without one.
                self.graph = None
                log.info("out of memory while capturing a CUDA graph; training continues without one.")
        if self.graph is None:
            self._compute(batch)
        else:
            self.graph.run(batch)

    def _compute(self, batch: Batch) -> None:
        ddp = self.loss if isinstance(self.loss, DistributedDataParallel) else None
        # The buckets of DDP need gradients that stay in place. Without them, a backward pass writes gradients
        # instead of adding them to zeros. In a CUDA graph, every replay writes to the same memory.
        self.optimizer.zero_grad(set_to_none=ddp is None)
        results = []
        for number, micro_batch in enumerate(batch.split(self.accumulation_steps), 1):
            weight = micro_batch.size / batch.size
            # DDP exchanges gradients once, with the last micro-batch.
            is_last = number == self.accumulation_steps
            no_sync = ddp.no_sync() if ddp is not None and not is_last else contextlib.nullcontext()
            with no_sync, self.engine.sync_batch_norm():
                with self.engine.autocast():
                    total, terms = self.forward(*micro_batch)
                (total * weight).backward()
            results.append(({"loss": total.detach(), **terms}, weight))
        self.optimizer.step()
        # Last, so that a step that is retried counts once.
        for losses, weight in results:
            self.sums.add(losses, weight)

    def optimizer_state(self) -> Any:
        return self.optimizer.state_dict()["state"]

    def load_optimizer_state(self, state: Any) -> None:
        # Without hyperparameters: a CUDA graph reads the learning rate from a tensor of its own.
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def _wrap_in_ddp(self, batch: Batch) -> DistributedDataParallel:
        """Wrap the loss in DDP, after a trial that finds out whether some parameters never get a gradient."""
        # A resumed run makes one more trial, which must not change its random numbers.
        rng_state = get_rng_state(self.engine.device)
        has_unused = self._try_out(batch)
        set_rng_state(rng_state, self.engine.device)
        options: dict[str, Any] = {_SYNC_BUFFERS: False}  # buffers are averaged at the end of an epoch
        ddp = DistributedDataParallel(
            self.loss,
            device_ids=[self.engine.device] if self.engine.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=has_unused,
            **options,
        )
        # The trial updated the buffers, and DDP broadcast those of the main process.
        self.buffers.restore()
        return ddp

    def _try_out(self, batch: Batch) -> bool:
        """Whether some parameters get no gradient, in any process. If one process fails, all of them do."""
        parameters = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]
        failure, has_unused = None, False
        try:
            with self.engine.sync_batch_norm(alone=True), self.engine.autocast():
                total, _ = self.loss(*batch.split(self.accumulation_steps)[0])
                gradients = torch.autograd.grad(total, parameters, allow_unused=True)
            has_unused = any(gradient is None for gradient in gradients)
        except Exception as error:
            failure = error
        told = "" if failure is None else f"{type(failure).__name__}: {failure}"
        outcomes = self.engine.world.gather(
            (told, failure is not None and is_out_of_memory(failure), has_unused)
        )
        if failure is not None:
            raise failure
        for rank, (told, is_memory, _) in enumerate(outcomes):
            if told:
                text = f"rank {rank} failed in its first step ({told})."
                raise torch.OutOfMemoryError(text) if is_memory else RunError(text)
        return any(has_unused for _, _, has_unused in outcomes)

    def compile(self) -> None:
        """Compile the network from the next step on."""
        if self.is_compiled or self.cannot_compile:
            return
        self.forward = _compiled(self.loss)
        self.is_compiled = True
        self._reset_graph()
        log.info("compiling the network.")

    def _stop_compiling(self, error: Exception) -> None:
        self.forward = self.loss
        self.is_compiled, self.cannot_compile = False, True
        self._reset_graph()
        log.warning("the network cannot be compiled: %s: %s", type(error).__name__, str(error)[:200])

    def _double_accumulation(self, batch_size: int) -> None:
        """Out of memory: split batches into twice as many micro-batches."""
        size = -(-batch_size // self.accumulation_steps)
        if size == 1 or self.engine.world.size > 1:
            raise OutOfMemoryError(
                f"a micro-batch of {size} images does not fit into the memory of {self.engine.device}. "
                "Choose a smaller batch, smaller images, or more accumulation steps (--accumulate)."
            ) from None
        self.accumulation_steps = min(2 * self.accumulation_steps, batch_size)
        self.optimizer.zero_grad(set_to_none=True)
        self._reset_graph()
        torch.cuda.empty_cache()
        log.warning(
            "out of memory: batches are now split into %d micro-batches of about %d images. "
            "The batch size is the same; batch norm sees micro-batches.",
            self.accumulation_steps,
            -(-batch_size // self.accumulation_steps),
        )

    def _explain(self, error: Exception, batch_size: int) -> None:
        if "more than 1 value per channel" in str(error):
            raise ConfigError(
                "a batch norm layer of this network cannot train on a micro-batch of one image, and "
                f"{batch_size} images are split into {self.accumulation_steps} micro-batches. "
                "Choose a larger batch, smaller images or fewer accumulation steps."
            ) from error

    def _reset_graph(self) -> None:
        if self.graph is not None:
            self.graph.reset()

    def release(self) -> None:
        """Wait for the GPU and free the CUDA graph: a process that exits before may crash."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        self._reset_graph()


def _compiled(loss: nn.Module) -> Callable[..., Any]:
    """Networks of other widths that were compiled before must not count toward the recompile limit."""
    options: dict[str, Any] = {"isolate_recompiles": True}
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:  # torch before 2.15
        torch.compiler.reset()
        options = {}
    compiled: Callable[..., Any] = torch.compile(loss, dynamic=False, **options)
    return compiled


class NormParameters(nn.ParameterDict):
    """Parameters of norm layers that a module holds without the layers."""


def _user_optimizer(model: nn.Module, factory: OptimizerFactory) -> torch.optim.Optimizer:
    with explain_failure("the optimizer factory"):
        optimizer = factory([parameter for parameter in model.parameters() if parameter.requires_grad])
    if not isinstance(optimizer, torch.optim.Optimizer):
        text = "optimizer is a function that returns a torch.optim.Optimizer for some parameters"
        raise ConfigError(f"{text}; it returned {describe(optimizer)}.")
    return optimizer


def make_sgd(
    model: nn.Module,
    recipe: Recipe,
    engine: Engine | None = None,
    *,
    is_graphed: bool = False,
    parameters: Sequence[nn.Parameter] | None = None,
) -> torch.optim.SGD:
    """SGD. Biases, scales and everything in norm layers decay only with `decay_norms`."""
    norms = [module for module in model.modules() if isinstance(module, (*NORMS, NormParameters))]
    of_norms = {id(parameter) for module in norms for parameter in module.parameters(recurse=False)}

    def decays(parameter: nn.Parameter) -> bool:
        # A scale of shape (1, channels, 1, 1) is a vector, too.
        return sum(size > 1 for size in parameter.shape) > 1 and id(parameter) not in of_norms

    given = model.parameters() if parameters is None else parameters
    trained = [parameter for parameter in given if parameter.requires_grad]
    weights = [parameter for parameter in trained if decays(parameter)]
    others = [parameter for parameter in trained if not decays(parameter)]
    decay = recipe.weight_decay
    return torch.optim.SGD(
        [
            {"params": weights, "weight_decay": decay},
            {"params": others, "weight_decay": decay if recipe.decay_norms else 0.0},
        ],
        # A CUDA graph reads the learning rate from the device.
        lr=torch.tensor(recipe.lr, device=engine.device) if is_graphed and engine else recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        fused=True if engine is not None and engine.device.type == "cuda" else None,
    )
