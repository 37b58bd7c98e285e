"""One step of training: forward, loss, backward, update; in parts where memory is short, together with other processes, or replayed."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.batch import Batch
from ..errors import ConfigError, ModelError, OutOfMemoryError
from ..utils.rng import get_rng_state, set_rng_state
from .auto_compile import AutoCompile
from .engine import Engine
from .memory import is_out_of_memory
from .objective import Losses, Objective
from .recipe import Recipe

__all__ = ["Step"]

log = logging.getLogger("peel")

#: Steps that run as usual before a CUDA graph is recorded: the allocator and cuDNN settle meanwhile.
WARM_UP_STEPS = 5


_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters


class _Loss(nn.Module):
    """The objective as a module, so that gradients are exchanged whatever it does with the model."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(
        self, images: Tensor, labels: Tensor, answers: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        losses = self.objective(self.model, Batch(images, labels, answers))
        return losses.total, losses.terms, losses.logits


class _Before:
    """The buffers of a network as they were before a step: a forward pass moves the running statistics of norm layers, and a step for
    which memory is short in its backward pass is done again.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.pairs: list[tuple[list[Tensor], list[Tensor]]] | None = None

    def keep(self) -> None:
        """All buffers of a type at once, into tensors that stay: to clone each of them would take as long as a small forward pass."""
        if self.pairs is None:
            alike: dict[torch.dtype, list[Tensor]] = {}
            for buffer in self.network.buffers():
                alike.setdefault(buffer.dtype, []).append(buffer)
            self.pairs = [
                (buffers, [torch.empty_like(buffer) for buffer in buffers]) for buffers in alike.values()
            ]
        for buffers, copies in self.pairs:
            torch._foreach_copy_(copies, buffers)

    def restore(self) -> None:
        for buffers, copies in self.pairs or ():
            torch._foreach_copy_(buffers, copies)


class Step:
    """The optimiser, the running sums and, on a GPU, the recorded step."""

    def __init__(self, model: nn.Module, objective: Objective, recipe: Recipe, engine: Engine) -> None:
        self.model, self.engine = model, engine
        self.loss: nn.Module = _Loss(model, objective)
        self.before = _Before(model)
        self.replays = engine.cuda_graphs and engine.world.size == 1
        self.optimiser = _optimiser(model, recipe, engine, self.replays)
        self.sums: dict[str, Tensor] = {"loss": torch.zeros((), dtype=torch.float64, device=engine.device)}
        self.parts = engine.accumulation_steps
        self.pace = AutoCompile(engine)
        self.is_compiled = False
        #: Whether a compiled step has run.
        self.is_proved = False
        self.done = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: Batch | None = None
        self.side: torch.cuda.Stream | None = None

    def __call__(self, batch: Batch, rate: float, steps_left: int) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.engine.world.size > 1 and not isinstance(self.loss, DistributedDataParallel):
            self.loss = self._shared(batch)
        if self.pace.should_compile(steps_left):
            self._compile()
        while True:
            try:
                self._run(batch)
                self.is_proved = self.is_compiled
                return
            except Exception as error:
                if is_out_of_memory(error):
                    self._halve(len(batch.images))
                elif self.is_compiled and not self.is_proved:
                    self._give_up_compiling(error)
                else:
                    self._explain(error, len(batch.images))
                    raise
            # Weights, momenta and sums have not moved yet, and gradients begin anew; so do random numbers, as those of dropout.
            self.before.restore()

    def _run(self, batch: Batch) -> None:
        # A replayed step asks for no memory, and several processes cannot do one again, but for the first one that is compiled. A recording
        # moves nothing while it is made, so that what is kept here holds for the step that follows one that did not fit; it comes before,
        # as it would be replayed too.
        if self.graph is None and (self.engine.world.size == 1 or (self.is_compiled and not self.is_proved)):
            self.before.keep()
        if not self.replays:
            self._compute(batch)
            return
        if self.graph is None:
            if self.done < WARM_UP_STEPS:
                self._on_side_stream(batch)
                self.done += 1
                return
            try:
                self._record(batch)
            except torch.OutOfMemoryError:  # on a GPU alone
                # A recording keeps its memory for itself. Steps fitted without one, so they do again.
                self._forget_recording()
                self.replays = False
                log.info("memory is too short to record the training step; it runs as it is.")
                self._compute(batch)
                return
        assert self.graph is not None
        assert self.static is not None
        self.static.fill(batch)
        self.graph.replay()

    def _compute(self, batch: Batch) -> None:
        # A recorded step needs gradients that stay where they are; so do buckets shared with other processes.
        self.optimiser.zero_grad(set_to_none=not self.replays and self.engine.world.size == 1)
        found = []
        for number, part in enumerate(batch.split(self.parts)):
            _pretend_short_memory(len(part.images))
            share = len(part.images) / len(batch.images)
            # Gradients travel once, with the last part.
            is_last = number + 1 == self.parts
            quiet = (
                self.loss.no_sync()
                if isinstance(self.loss, DistributedDataParallel) and not is_last
                else contextlib.nullcontext()
            )
            with quiet, self.engine.sync_batch_norm():
                with self.engine.autocast():
                    total, terms, scores = self.loss(*part)
                (total * share).backward()
            if isinstance(self.loss, DistributedDataParallel) and is_last:
                # Whoever left a layer out finds out here: the others would wait for its gradients, and it for their answers.
                self.loss._check_reducer_finalized()  # type: ignore[no-untyped-call]
            found.append((Losses(total.detach(), terms, scores.detach()), part.labels, share))
        self.optimiser.step()
        # Only now: a step for which memory is short until here is done again, and would count twice.
        for losses, labels, share in found:
            self._add(losses, labels, share)

    def _shared(self, batch: Batch) -> DistributedDataParallel:
        """The loss, with gradients shared among all processes."""
        # Statistics of norm layers are brought together at the end of an epoch, not at every step. The argument was renamed.
        sync = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers"
        options: dict[str, Any] = {
            sync: False,
            "device_ids": [self.engine.device] if self.engine.device.type == "cuda" else None,
        }
        buffers = {name: buffer.clone() for name, buffer in self.loss.named_buffers()}
        # A head that only runs to be ignored, as of networks with auxiliary ones, would be waited for otherwise.
        # Random paths may differ between processes, but whether the gradients are asked for must not.
        is_unused = any(gradient is None for gradient in self._tried_together(batch))
        options["find_unused_parameters"] = self.engine.world.any(is_unused)
        shared = DistributedDataParallel(self.loss, gradient_as_bucket_view=True, **options)
        # The trial has moved them, and the first process has sent its own to all.
        for name, buffer in self.loss.named_buffers():
            buffer.copy_(buffers[name])
        return shared

    def _tried_together(self, batch: Batch) -> tuple[Tensor | None, ...]:
        """Gradients of a part of the batch, and of smaller ones until one fits in all processes: later, the others would already be waiting
        for the gradients of the one whose memory is short.
        """
        while True:
            gradients = self._gradients(batch.split(self.parts)[0])
            if not self.engine.world.any(gradients is None):
                assert gradients is not None
                return gradients
            self._halve(len(batch.images))

    def _gradients(self, part: Batch) -> tuple[Tensor | None, ...] | None:
        """Of each parameter, None for one that does not reach the loss; None instead of all where memory is short."""
        trained = [parameter for parameter in self.loss.parameters() if parameter.requires_grad]
        drawn = get_rng_state(self.engine.device)
        try:
            _pretend_short_memory(len(part.images))
            # What is not there yet: momenta, and gradients on their way to the others.
            coming = [torch.empty_like(parameter) for parameter in trained for _ in range(2)]
            with self.engine.sync_batch_norm(), self.engine.autocast():
                total, _, _ = self.loss(*part)
                gradients = torch.autograd.grad(total, trained, allow_unused=True)
            del coming
            return gradients
        except Exception as error:
            if is_out_of_memory(error):
                return None
            self._explain(error, len(part.images) * self.parts)
            raise
        finally:
            # The step itself draws what the trial drew, also after a stop.
            set_rng_state(drawn, self.engine.device)

    def _explain(self, error: Exception, size: int) -> None:
        """An error that says what to do, where torch's own does not."""
        if isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
            if self.parts > self.engine.accumulation_steps:
                raise OutOfMemoryError(
                    f"{-(-size // (self.parts // 2))} images do not fit into the memory of {self.engine.device}, and a part of one image "
                    "is too small for a batch norm layer of this network. Choose smaller images."
                ) from error
            raise ConfigError(
                f"a batch norm layer of this network has one value per channel where one image goes through by itself, and a process sees "
                f"{size} images of a batch in {self.parts} parts. Choose a larger batch or fewer parts, at least two images in each."
            ) from error
        if "Expected to have finished reduction" in str(error):
            raise ModelError(
                "a layer of the network had no part in a step of this process, as where layers are left out by chance, and processes that "
                "share gradients wait for each other's. Train it with one process, or let such layers always take part, multiplied by zero."
            ) from error

    def _compile(self) -> None:
        """Turn the network and its loss into fused kernels from the next step on."""
        # What was compiled for other widths in this process would count against a limit, beyond which nothing is compiled any more.
        torch._dynamo.reset()
        self.loss.compile(dynamic=False)
        self.is_compiled = True
        self._forget_recording()
        log.info("compiling the network: the steps that are left repay it.")

    def _give_up_compiling(self, error: Exception) -> None:
        """There is no compiler, or it cannot take this network: a long training is not lost for that."""
        self.loss._compiled_call_impl = None
        torch._dynamo.reset()
        self.is_compiled = False
        self._forget_recording()
        log.warning(
            "the network cannot be compiled and runs as it is (%s: %s).",
            type(error).__name__,
            " ".join(str(error).split())[:200],
        )

    def _halve(self, size: int) -> None:
        """Memory is short: twice as many parts of half the size, the same batch."""
        if self.parts >= size or isinstance(self.loss, DistributedDataParallel):
            raise OutOfMemoryError(
                f"a part of {-(-size // self.parts)} images does not fit into the memory of {self.engine.device}. "
                "Choose a smaller batch, smaller images, or more parts (--parts)."
            ) from None
        self.parts = min(2 * self.parts, size)
        self._forget_recording()
        self.optimiser.zero_grad(set_to_none=True)
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()
        # All processes halve together.
        log.log(
            logging.WARNING if self.engine.world.is_main_process else logging.DEBUG,
            "memory is short: batches now go through in %d parts of about %d images. The batch is the same; batch norm sees the parts.",
            self.parts,
            -(-size // self.parts),
        )

    def _forget_recording(self) -> None:
        self.graph, self.static, self.done = None, None, 0

    def _on_side_stream(self, batch: Batch) -> None:
        """A step as a recording needs it to have run before: away from the default stream."""
        if self.side is None:
            self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.side):
                self._compute(batch)
        finally:
            # Also where memory is short: what is still under way there would move the buffers after they are restored.
            torch.cuda.current_stream().wait_stream(self.side)

    def _record(self, batch: Batch) -> None:
        self.static = batch.clone()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that pins memory for images, may go on meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._compute(self.static)

    @torch.no_grad()
    def _add(self, losses: Losses, labels: Tensor, share: float) -> None:
        parts = {
            "loss": losses.total,
            **losses.terms,
            "top1": (losses.logits.argmax(1) == labels).float().mean(),
        }
        for name, value in parts.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros((), dtype=torch.float64, device=value.device)
            self.sums[name].add_(value.detach() * share)

    def momenta(self) -> dict[str, Tensor | None]:
        return {
            name: self.optimiser.state[parameter].get("momentum_buffer")
            for name, parameter in self._trained()
        }

    def set_momenta(self, momenta: dict[str, Tensor | None]) -> None:
        if all(momentum is None for momentum in momenta.values()):
            return
        for name, parameter in self._trained():
            momentum = momenta.get(name)
            # In the memory order of the parameter, as the optimiser itself makes it; a fused one wants it of all parameters or of none.
            kept = (
                torch.zeros_like(parameter)
                if momentum is None
                else torch.empty_like(parameter).copy_(momentum)
            )
            self.optimiser.state[parameter]["momentum_buffer"] = kept

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad
        ]


def _optimiser(model: nn.Module, recipe: Recipe, engine: Engine, replays: bool) -> torch.optim.SGD:
    """SGD; biases and the scales and shifts of norm layers, which have one axis at most, do not decay unless asked to."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1 or recipe.decay_norms]
    others = [parameter for parameter in trained if parameter.ndim <= 1 and not recipe.decay_norms]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # A recorded step reads the rate from the device.
    rate: Any = torch.tensor(recipe.lr, device=engine.device) if replays else recipe.lr
    fused = True if engine.device.type == "cuda" else None
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        fused=fused,
    )


def _pretend_short_memory(size: int) -> None:
    """The fault `oom`: parts as large as the one it struck do not fit any more."""
    limit = os.environ.get("PEEL_FAULT_OOM")
    if limit and size >= int(limit):
        raise torch.OutOfMemoryError("a fault that was ordered")
