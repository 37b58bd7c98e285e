"""Step 5: the slim network is trained with the labels and with the output of a teacher.

`Distillation` is the paper's objective, with the original network as teacher. `InPlace` is that of slimmable
networks: the teacher is a wider network that shares its weights with the student and trains with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ..data.batch import Batch, call_model
from ..errors import ModelError
from ..graph import ChannelGraph
from ..graph.channel_graph import Run
from ..graph.copying import deep_copy
from ..graph.parameters import norm_layers, spans
from ..graph.rebuild import tensors_of
from ..surgery import attach_info, info_of, slim
from ..train.objective import Losses, Objective, main_output
from ..train.step import NormParameters


class Terms(NamedTuple):
    """What counts in the loss of the student."""

    kd_weight: float
    temperature: float
    hard_weight: float
    """The weight of the labels."""


#: Kind of distillation -> its defaults: those of the paper, and of slimmable networks.
DISTILLATIONS = {
    "teacher": Terms(0.1, 1.0, 1.0),
    "in-place": Terms(1.0, 1.0, 0.0),
    "none": Terms(0.0, 1.0, 1.0),
}

#: A repaired network learns from its original alone. On 2,000 and 10,000 images this ends 1.0 points above
#: labels with a tenth of the distillation loss (36 pairs of three networks), and never below it. The labels
#: of few images are soon memorized: with them, fine-tuning often loses what the repair gave.
FINE_TUNING = Terms(1.0, 4.0, 0.0)

#: Width of the in-place teacher, relative to the original.
IN_PLACE_WIDTH = 1.5


#: Default weight where outputs are no class logits: their relative error is about 1 before training.
OUTPUT_WEIGHT = 1.0


def distillation_loss(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, logits: bool = True
) -> Tensor:
    """How far the output of a student is from that of its teacher.

    Of class logits (`samples x classes`, or with further axes for positions): KL(teacher || student) at a
    temperature, the mean over samples and positions, scaled so that gradients keep their size. With
    `logits=False`, for any other output: the mean squared error, relative to the variance of the teacher's
    output.

    >>> loss = criterion(output, target) + 0.1 * peel.distillation_loss(output, teacher(images).detach())
    """
    student, teacher = student.float(), teacher.float()
    if student.shape != teacher.shape:
        raise ModelError(
            f"the student's output has shape {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}: "
            "distillation compares outputs of one shape."
        )
    if not logits:
        return F.mse_loss(student, teacher) / teacher.var(correction=0).clamp_min(1e-12)
    target = F.log_softmax(teacher / temperature, dim=1)
    given = F.log_softmax(student / temperature, dim=1)
    positions = student[0, 0].numel()
    return F.kl_div(given, target, reduction="batchmean", log_target=True) * temperature**2 / positions


@dataclass(frozen=True)
class Distillation:
    """The paper's objective: the loss on the labels plus `weight` times the distance from the teacher."""

    objective: Objective
    teacher: nn.Module
    weight: float = DISTILLATIONS["teacher"].kd_weight
    temperature: float = 1.0
    hard_weight: float = 1.0
    logits: bool = True
    """Whether outputs are class logits."""

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        losses = self.objective(model, batch)
        output = batch.teacher_logits
        if output is None:
            with torch.no_grad():
                output = main_output(call_model(self.teacher, batch.inputs))
        term = _distance(losses.output, output, self)
        terms = {**losses.terms, "distillation": term.detach()}
        return Losses(self.hard_weight * losses.total + self.weight * term, terms, losses.output)


class Pair(nn.Module):
    """A wide network and a student whose weights are the first channels of the wide network's.

    Norm layers are the student's own, as their statistics differ. Called as a module, a pair is the student.
    """

    def __init__(self, wide: nn.Module, student: nn.Module, places: Mapping[str, list[list[slice]]]) -> None:
        """`places`: shared parameter -> per axis, its positions in the parameter of the wide network."""
        super().__init__()
        self.wide = wide
        own = {name: p for name, p in student.named_parameters() if name not in places}
        self.own = NormParameters({_key(name): parameter for name, parameter in own.items()})
        for name, buffer in student.named_buffers():
            self.register_buffer(_key(name), buffer)
        # A tuple keeps the student out of the module tree: its parameters must not be trained or saved twice.
        self._student = (student,)
        self._places = dict(places)

    def forward(self, *args: Any, **options: Any) -> Any:
        student = self._student[0].train(self.training)
        return functional_call(student, self._tensors(), args, options)

    def _tensors(self) -> dict[str, Tensor]:
        """The student's parameters and buffers, by their names in the student."""
        tensors: dict[str, Tensor] = {}
        for name, _ in self._student[0].named_parameters():
            if name in self._places:
                tensors[name] = _sliced(self.wide.get_parameter(name), self._places[name])
            else:
                tensors[name] = self.own[_key(name)]
        for name, _ in self._student[0].named_buffers():
            tensors[name] = self.get_buffer(_key(name))
        return tensors

    @torch.no_grad()
    def student(self) -> nn.Module:
        """A copy of the student as a network of its own, in the mode of the pair."""
        student = deep_copy(self._student[0]).train(self.training)
        tensors = self._tensors()
        for name, target in tensors_of(student).items():
            target.data = tensors[name].detach().clone()
        return student


@dataclass(frozen=True)
class InPlace:
    """The wide network learns from the labels, the student from it (with `hard_weight`, from both)."""

    objective: Objective
    weight: float = DISTILLATIONS["in-place"].kd_weight
    hard_weight: float = 0.0
    temperature: float = 1.0
    logits: bool = True

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        assert isinstance(model, Pair)
        wide = self.objective(model.wide, batch)
        student = self.objective(model, batch)
        term = _distance(student.output, None if wide.output is None else wide.output.detach(), self)
        total = wide.total + self.weight * term
        if self.hard_weight:
            total = total + self.hard_weight * student.total
        terms = {**student.terms, "wide": wide.total.detach(), "distillation": term.detach()}
        return Losses(total, terms, student.output)


def _distance(student: Tensor | None, teacher: Tensor | None, kind: Distillation | InPlace) -> Tensor:
    if student is None or teacher is None:
        raise ModelError(
            "distillation needs a model that returns a tensor, a tuple that starts with one, or `logits` or "
            '`out` in a dict. Set distill="none" for this one.'
        )
    return distillation_loss(student, teacher, temperature=kind.temperature, logits=kind.logits)


def in_place_pair(
    model: nn.Module, graph: ChannelGraph, widths: Mapping[str, int], factor: float = IN_PLACE_WIDTH
) -> Pair:
    """A pair whose wide network is `factor` times the original, and at least as wide as the student.

    Every parameter is trained, also one that is frozen in the given model.
    """
    student_widths = graph.check(widths)
    wide_widths = {}
    for name, width in graph.widths.items():
        step = graph.steps[name]
        wide_widths[name] = max(student_widths[name], round(width * factor / step) * step)
    wide = slim(model, wide_widths, graph=graph).requires_grad_(True)
    student = slim(model, student_widths, graph=graph).requires_grad_(True)
    layouts, wide_layouts = graph.at(student_widths).layouts, graph.at(wide_widths).layouts
    norms = norm_layers(graph)
    shared = [name for name, _ in student.named_parameters() if name.rpartition(".")[0] not in norms]
    places = {name: list(map(_first, wide_layouts[name], layouts[name])) for name in shared}
    pair = Pair(wide, student, places)
    attach_info(pair, info_of(student))
    return pair


def _first(wide: tuple[Run, ...], own: tuple[Run, ...]) -> list[slice]:
    """The positions of the student's channels, the first of every run, on an axis of the wide network."""
    pairs = zip(spans(wide), own, strict=True)
    return [slice(span.start, span.start + run.length) for (_, span), run in pairs]


def _sliced(tensor: Tensor, places: list[list[slice]]) -> Tensor:
    for axis, pieces in enumerate(places):
        parts = [tensor.narrow(axis, piece.start, piece.stop - piece.start) for piece in pieces]
        tensor = torch.cat(parts, axis) if len(parts) > 1 else parts[0]
    return tensor


def _key(name: str) -> str:
    """Names in a module tree hold no dots."""
    return name.replace(".", "__")
