"""Loss, metric and optimizer of the user's own: what they compute, and the trial before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.detectors import IMAGES, TARGETS, DetectionNet
from helpers.own_data import PAIR, Hits, TwoInputs, bce, hits, numbered
from helpers.small import CPU, PLAIN, Small, fresh, same_weights
from peel.data.augmentation import EVAL
from peel.data.batch import Batch
from peel.data.datasets import Data
from peel.errors import ConfigError, DataError
from peel.train.loop import evaluate, fit
from peel.train.objective import ModelLoss, UserLoss
from peel.train.task import Task
from peel.train.trial import try_task

pytestmark = pytest.mark.usefixtures("one_thread")


def own(train: Any = PAIR[0], val: Any = PAIR[1], batch_size: int = 20) -> Data:
    return Data.from_torch(train, val, batch_size=batch_size)


def test_evaluation_is_that_of_all_samples_at_once() -> None:
    model, (images, targets) = fresh(num_classes=3).eval(), PAIR[1].tensors
    with torch.no_grad():
        output = model(images)
    for metric in (hits, Hits()):
        task = Task(bce, metric, is_classification=False)
        found = evaluate(model, own().test, CPU, task=task)  # batches of 20, 20 and 8
        assert found.loss == pytest.approx(float(bce(output, targets)), rel=1e-6)
        assert found.metric == pytest.approx(float(hits(output, targets)), rel=1e-6)
        assert found.top1 is None


def test_positions_are_classified_like_samples() -> None:
    net = nn.Conv2d(3, 4, 1).eval()
    images, targets = torch.randn(10, 3, 6, 6), torch.randint(4, (10, 6, 6))
    data = own(TensorDataset(images, targets), TensorDataset(images, targets), batch_size=4)
    task = try_task(net, data, Task())
    assert task.is_classification
    found = evaluate(net, data.test, CPU, task=task)
    with torch.no_grad():
        logits = net(images)
    assert found.top1 == pytest.approx(float((logits.argmax(1) == targets).float().mean()))
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-6)


def test_the_schedule_scales_the_rates_of_an_own_optimizer() -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)

    recipe = replace(PLAIN, weight_decay=0.0)
    plain, own_one = fresh(num_classes=3), fresh(num_classes=3)
    train = own(numbered(100), numbered(20)).train
    fit(plain, Task().objective(), train, recipe, engine=CPU, seed=0)
    task = Task(optimizer=factory)
    fit(own_one, task.objective(), train, replace(recipe, lr=1.0), engine=CPU, seed=0, task=task)
    pairs = zip(plain.parameters(), own_one.parameters())
    worst = max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)
    assert worst < 1e-5
    assert not same_weights(plain, fresh(num_classes=3))


def test_a_detector_computes_its_losses_itself() -> None:
    net = DetectionNet().train()
    losses = ModelLoss()(net, Batch(IMAGES, TARGETS))
    own_losses = net(IMAGES, TARGETS)
    assert losses.total.item() == pytest.approx(sum(own_losses.values()).item())
    assert losses.terms.keys() == own_losses.keys()
    before = {name: value.clone() for name, value in net.named_buffers()}
    ModelLoss()(net.eval(), Batch(IMAGES, TARGETS))
    assert not net.training
    assert all(torch.equal(value, before[name]) for name, value in net.named_buffers())


def test_the_trial_leaves_the_model_alone_and_finds_out_what_the_outputs_are() -> None:
    model = fresh(num_classes=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = try_task(model, own(), Task(bce, hits))
    assert (task.is_classification, task.has_output) == (False, True)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert try_task(model, own(numbered(9), numbered(9)), Task()).is_classification
    images = list(zip(IMAGES * 4, TARGETS * 4))
    loader = DataLoader(images, 4, collate_fn=lambda items: tuple(map(list, zip(*items))))
    task = try_task(DetectionNet(), own(loader, loader), Task("model", lambda found, targets: len(found)))
    assert (task.is_classification, task.has_output) == (False, False)


def test_two_inputs_and_a_dict_as_output() -> None:
    images, targets = PAIR[0].tensors
    by_place = [((image, image), target) for image, target in zip(images, targets)]
    by_name = [{"first": image, "second": image, "target": target} for image, target in zip(images, targets)]
    model, totals = TwoInputs(), []
    for samples, get in ((by_place, lambda target: target), (by_name, lambda batch: batch["target"])):
        loss = UserLoss(lambda output, target, get=get: bce(output["out"], get(target)))
        data = own(samples, samples)
        assert try_task(model, data, Task(loss.loss)).has_output
        batch = next(iter(data.train.batches(torch.arange(20), 20, EVAL, CPU.device)))
        totals.append(loss(model, batch).total.item())
    assert totals[0] == totals[1]


def mistaken(output: Tensor, target: Tensor) -> Any:
    raise KeyError("no such label")


def nothing(output: Tensor, target: Tensor) -> None:
    output.mean()


def per_sample(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="none")


def infinite(output: Tensor, target: Tensor) -> Tensor:
    return bce(output, target) / 0


def detached(output: Tensor, target: Tensor) -> Tensor:
    return bce(output.detach(), target)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task(per_sample), r"loss per_sample must return a scalar .* not a tensor of shape \(4, 3\)"),
        (lambda: Task(nothing), r"loss nothing must return a scalar tensor of floats, not nothing"),
        (lambda: Task(infinite), r"the loss infinite of the first samples is inf: it must be finite"),
        (lambda: Task(detached), r"the loss detached has no gradient"),
        (lambda: Task(mistaken), r"the loss mistaken failed: KeyError: 'no such label'"),
        (lambda: Task(), r"the target .* is a tensor of shape \(4, 3\) .* Give loss="),
        (lambda: Task("modle"), r'loss is a function .* or "model", not \'modle\''),
        (lambda: Task(bce, mistaken), r"the metric mistaken failed: KeyError: 'no such label'"),
        (lambda: Task(bce, per_sample), r"metric per_sample must return a number, not a tensor"),
        (
            lambda: Task(bce, lambda output, target: torch.nan),
            r"metric <lambda> .* is nan: it must be finite",
        ),
        (lambda: Task(bce, 3), r"metric is a function .* not a int"),
        (lambda: Task("model"), r"the model's loss must return a scalar"),
    ],
)
def test_a_bad_loss_or_metric_is_named_before_training(make: Callable[[], Task], message: str) -> None:
    class Own(Small):
        def forward(self, x: Tensor, target: Any = None) -> Tensor:
            return super().forward(x)

    with pytest.raises(ConfigError, match=message):
        try_task(Own(3), own(), make())


def test_an_optimizer_in_the_place_of_its_factory_is_refused_with_an_example() -> None:
    made = torch.optim.SGD(Small(3).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"not a SGD\. .*=lambda parameters: torch\.optim\.SGD\(parameters"):
        Task(bce, optimizer=made)  # type: ignore[arg-type]


def test_a_model_whose_parameters_are_all_frozen_is_named() -> None:
    model = Small(3).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"no parameter of the model requires a gradient: all are frozen"):
        try_task(model, own(), Task(bce))
    model.fc.requires_grad_(True)
    try_task(model, own(), Task(bce))


def test_a_batch_that_the_model_cannot_take_is_named() -> None:
    wide = TensorDataset(torch.zeros(8, 5, 8, 8), torch.zeros(8, 3))
    with pytest.raises(DataError, match=r"cannot take the inputs of the training data: a tensor of shape"):
        try_task(Small(3), own(wide), Task(bce))
    with pytest.raises(DataError, match=r"cannot take the inputs of the validation data"):
        try_task(Small(3), own(val=wide), Task(bce))
    two = [((torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)), torch.zeros(3))] * 4
    with pytest.raises(DataError, match=r"2 positional arguments, as they are a tuple"):
        try_task(Small(3), own(two), Task(bce))
    with pytest.raises(DataError, match=r"class numbers .* go from 0 to 2, but .* logits of 2 classes"):
        try_task(Small(2), own(numbered(50), numbered(50)), Task())


@pytest.mark.parametrize("factory", [lambda parameters: "sgd", lambda parameters: 1 / 0])
def test_a_bad_optimizer_is_named(factory: Any) -> None:
    task = Task(bce, optimizer=factory)
    with pytest.raises(ConfigError, match=r"optimizer .*(returned a str|ZeroDivisionError)"):
        fit(Small(3), task.objective(), own().train, PLAIN, engine=CPU, seed=0, task=task)
