"""Step 5: training the slim network from scratch, with the labels and with what a teacher says.

`Distillation` is the paper's objective with the original network as teacher. `InPlace` is the distillation of slimmable networks: a
wider network trains beside the student, shares its weights with it, and is its teacher.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..cost.widths import Widths
from ..data.batch import Batch
from ..errors import ConfigError
from ..graph import ChannelGraph
from ..graph.channel_graph import Run
from ..surgery import slim
from ..train.objective import Losses, Objective, get_logits

__all__ = ["Distillation", "InPlace", "Pair", "in_place_pair", "soft_loss"]

#: How much wider than the original the network is that teaches in place.
IN_PLACE_WIDTH = 1.5

DISTILLATIONS: dict[str, str] = {
    "teacher": "labels, and the class probabilities of the original network",
    "in-place": "a wider network that shares its weights with the student and learns beside it is the teacher",
    "none": "labels only",
}


def soft_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student), the mean over the batch, at a temperature; its gradients keep their size at any temperature."""
    target = F.log_softmax(teacher.float() / temperature, dim=1)
    given = F.log_softmax(student.float() / temperature, dim=1)
    return F.kl_div(given, target, reduction="batchmean", log_target=True) * temperature**2


@dataclass(frozen=True)
class Distillation:
    """The paper's objective: the loss on the labels plus `weight` times the distance to the teacher."""

    objective: Objective
    teacher: nn.Module
    weight: float = 0.1
    temperature: float = 1.0

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        losses = self.objective(model, batch)
        answers = batch.teacher_logits
        if answers is None:
            with torch.no_grad():
                answers = get_logits(self.teacher(batch.images))
        term = soft_loss(losses.logits, answers, self.temperature)
        return Losses(
            losses.total + self.weight * term, {**losses.terms, "distillation": term.detach()}, losses.logits
        )


class Pair(nn.Module):
    """A wide network and the student that lives in it: the student's weights are the first channels of the wide network's.

    Norm layers are the student's own, as their statistics differ. Called as a module, a pair is the student.
    """

    def __init__(
        self,
        wide: nn.Module,
        student: nn.Module,
        index: Mapping[str, tuple[Tensor | slice, ...]],
        own: set[str],
    ) -> None:
        super().__init__()
        self.wide = wide
        self.own = nn.ParameterDict({_key(name): p for name, p in student.named_parameters() if name in own})
        for name, buffer in student.named_buffers():
            self.register_buffer(_key(name), buffer)
        # The student's code without its parameters: kept out of the module tree, so that nothing trains or saves them twice.
        self.__dict__["_student"] = student
        self._index = dict(index)
        self._own_names = own

    def forward(self, images: Tensor) -> Any:
        self._code.train(self.training)
        return functional_call(self._code, self._tensors(), (images,))

    @property
    def peel_record(self) -> dict[str, Any]:
        """That of the student."""
        record: dict[str, Any] = self._code.peel_record  # type: ignore[assignment]
        return record

    @property
    def _code(self) -> nn.Module:
        code: nn.Module = self.__dict__["_student"]
        return code

    def _tensors(self) -> dict[str, Tensor]:
        wide = dict(self.wide.named_parameters())
        device = next(iter(wide.values())).device
        self._index = {
            name: tuple(_on(places, device) for places in axes) for name, axes in self._index.items()
        }
        tensors = {name: _sliced(wide[name], axes) for name, axes in self._index.items()}
        tensors.update({name: self.own[_key(name)] for name in self._own_names})
        tensors.update({name: self.get_buffer(_key(name)) for name, _ in self._code.named_buffers()})
        return tensors

    @torch.no_grad()
    def student(self) -> nn.Module:
        """The student as a network of its own, in the mode of the pair; training the pair on does not change it."""
        student = copy.deepcopy(self._code).train(self.training)
        for name, tensor in self._tensors().items():
            is_parameter = name in self._index or name in self._own_names
            target: Tensor = student.get_parameter(name) if is_parameter else student.get_buffer(name)
            target.data = tensor.detach().clone()
        return student


@dataclass(frozen=True)
class InPlace:
    """The wide network learns from the labels, the student from the wide network (and, with `hard_weight`, from the labels too)."""

    objective: Objective
    weight: float = 1.0
    hard_weight: float = 0.0
    temperature: float = 1.0

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        if not isinstance(model, Pair):
            raise ConfigError("in-place distillation trains a pair of networks; build it with in_place_pair.")
        wide = self.objective(model.wide, batch)
        student = self.objective(model, batch)
        term = soft_loss(student.logits, wide.logits.detach(), self.temperature)
        total = wide.total + self.weight * term
        if self.hard_weight:
            total = total + self.hard_weight * student.total
        terms = {
            "cross_entropy": student.terms["cross_entropy"],
            "wide": wide.total.detach(),
            "distillation": term.detach(),
        }
        return Losses(total, terms, student.logits)


def in_place_pair(
    model: nn.Module, graph: ChannelGraph, widths: Mapping[str, int], factor: float = IN_PLACE_WIDTH
) -> Pair:
    """A wide network, `factor` times the original or as wide as the student where that is wider, with the student in it."""
    student_widths = graph.check(widths)
    wide_widths = Widths(
        {
            name: max(student_widths[name], round(width * factor / graph.steps[name]) * graph.steps[name])
            for name, width in graph.widths.items()
        }
    )
    wide = slim(model, wide_widths, graph=graph)
    student = slim(model, student_widths, graph=graph)
    units = graph.units(student_widths)
    norms = {name.rpartition(".")[0] for name in graph.scales}
    layouts = graph.at(wide_widths).layouts
    own, index = set(), {}
    for name, _ in student.named_parameters():
        if name.rpartition(".")[0] in norms:
            own.add(name)
        else:
            index[name] = tuple(_first(runs, units) for runs in layouts[name])
    return Pair(wide, student, index, own)


def _first(runs: tuple[Run, ...], units: list[int]) -> Tensor | slice:
    """The places of the first channels of every run of an axis: a slice where they lie together."""
    offset, places = 0, []
    for run in runs:
        kept = run.length if run.tie < 0 else units[run.tie] * run.inner
        places.append(torch.arange(offset, offset + kept))
        offset += run.length
    joined = torch.cat(places) if places else torch.zeros(0, dtype=torch.long)
    return slice(0, len(joined)) if torch.equal(joined, torch.arange(len(joined))) else joined


def _sliced(tensor: Tensor, places: tuple[Tensor | slice, ...]) -> Tensor:
    for axis, chosen in enumerate(places):
        if isinstance(chosen, slice):
            tensor = tensor.narrow(axis, 0, chosen.stop)
        else:
            tensor = tensor.index_select(axis, chosen)
    return tensor


def _on(places: Tensor | slice, device: torch.device) -> Tensor | slice:
    return places if isinstance(places, slice) else places.to(device)


def _key(name: str) -> str:
    """Names inside a module tree hold no dots."""
    return name.replace(".", "__")
