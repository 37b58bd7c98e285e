"""Model, data, recipes and plan of a run: loaded, and checked against each other."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import zoo
from ..cost.constraint import Constraint
from ..data.datasets import Data, Split, hold_out, load_data
from ..data.in_memory import InMemoryImages
from ..data.torch_data import DatasetSplit, LoaderSplit
from ..errors import ConfigError, DataError, ModelError
from ..graph import ChannelGraph, trace
from ..graph.copying import deep_copy
from ..methods.method import Method, Recipes
from ..steps.distillation import DISTILLATIONS, FINE_TUNING, OUTPUT_WEIGHT
from ..surgery.info import info_of
from ..train.callbacks import Callback
from ..train.engine import Engine, make_engine
from ..train.objective import get_logits
from ..train.recipe import backbone_recipe, named_recipe
from ..train.task import Task
from ..train.trial import try_task
from ..utils.rng import derive_seed, seed_everything
from .bench import attach_latency, latency_notes
from .config import Config
from .loaded import Loaded
from .original import input_of
from .own_data import restrict_engine, restrict_settings
from .subject import subject_of

#: Training images that are left out: this fraction, at most and at least so many.
HELD_OUT, MOST_HELD_OUT, LEAST_HELD_OUT = 0.1, 1000, 16

#: The same for methods that judge networks by them: LeGR takes 2,000, AMC 3,000.
MOST_JUDGES = 5000


def load_model_and_data(
    model: nn.Module | str, data: Data | str, config: Config, weights: nn.Module | Mapping[str, Tensor] | str
) -> tuple[nn.Module, Data]:
    """The images are preprocessed as the settings say; else as for the weights; else by their own."""
    if isinstance(data, Data) and data.is_own:
        if isinstance(model, str):
            raise ConfigError(
                f"with data of your own, give the model itself instead of {model!r}, such as "
                f"peel.zoo.create({model!r}, num_classes=...)."
            )
        return _on_cpu(model), data.normalized(config.mean, config.std)
    known = zoo.pretrained(model) if isinstance(model, str) and weights == "pretrained" else None
    stored = asdict(known) if known else input_of(model if weights == "pretrained" else weights)

    def load(channels: int) -> Data:
        if isinstance(data, Data):
            return data
        return load_data(
            data,
            image_size=config.image_size,
            channels=channels,
            root=config.data_root,
            skip_corrupt=config.skip_corrupt,
            **({} if known is None else {"crop": (known.size, known.resize)}),
        )

    if isinstance(model, str):
        loaded = load(zoo.find(model).input_size[0])
        network = zoo.create_for(model, len(loaded.classes), pretrained=known is not None)
    else:
        loaded, network = load(next(_conv_inputs(model), 3)), _on_cpu(model)
    channels = _input_channels(network, loaded.shape)
    loaded = load(channels) if channels != loaded.shape[0] else loaded
    mean, std = (None if getattr(config, name) else stored.get(name) for name in ("mean", "std"))
    return network, loaded.normalized(mean, std, "of the weights").normalized(config.mean, config.std)


def has_new_classifier(model: nn.Module | str, weights: object, data: Data) -> bool:
    """Whether pretrained weights are asked for that know another number of classes."""
    if not isinstance(model, str) or weights != "pretrained":
        return False
    return zoo.pretrained(model).classes != len(data.classes)


def _on_cpu(model: nn.Module) -> nn.Module:
    """The model itself, or a copy of it where it is on another device."""
    is_elsewhere = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return deep_copy(model).cpu() if is_elsewhere else model


def _input_channels(network: nn.Module, shape: tuple[int, int, int]) -> int:
    """The input channels of the first convolution with which the network runs."""
    candidates = [*_conv_inputs(network)] or [shape[0]]
    for channels in dict.fromkeys(candidates):
        with contextlib.suppress(Exception):
            _logits_of_zeros(network, (channels, *shape[1:]))
            return channels
    return candidates[0]


def _conv_inputs(network: nn.Module) -> Iterator[int]:
    return (layer.in_channels for layer in network.modules() if isinstance(layer, nn.Conv2d))


def _logits_of_zeros(network: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The logits of one black image. Train and eval modes are left as they were."""
    modes = {name: module.training for name, module in network.named_modules()}
    try:
        with torch.inference_mode():
            return get_logits(network.eval()(torch.zeros(1, *shape)))
    finally:
        for name, module in network.named_modules():
            module.training = modes[name]


def check_model(network: nn.Module, data: Data, task: Task | None = None) -> Task:
    """Refuse a model that cannot be trained on the data. The task, with what a trial says about it."""
    dtypes = {parameter.dtype for parameter in network.parameters()}
    if not dtypes:
        raise ModelError(f"{type(network).__name__} has no parameters: there is nothing to train.")
    if dtypes != {torch.float32}:
        other = next(iter(dtypes - {torch.float32}))
        raise ModelError(f"the model has {other} weights; peel trains float32 weights: call model.float().")
    extra = next((name for name in network.state_dict() if name.endswith("_extra_state")), None)
    if extra is not None:
        raise ModelError(f"{extra}: peel cannot save what get_extra_state returns. Make it a buffer.")
    if not data.is_own:
        _check_classes(network, data)
    return try_task(network, data, task or Task()) if data.is_own or task not in (None, Task()) else Task()


def _check_classes(network: nn.Module, data: Data) -> None:
    logits, count = _logits_of_zeros(network, data.shape), len(data.classes)
    if count < 2:
        raise DataError(
            f"{data.name} has one class, {', '.join(data.classes)}: a classifier needs two or more."
        )
    if logits.ndim != 2 or logits.shape[1] != count:
        raise DataError(
            f"the model returns logits of shape {tuple(logits.shape[1:])}, but {data.name} has {count} "
            f"classes. Build the model with {count} outputs, or choose other data."
        )
    for name, split in (("training", data.train), ("test", data.test)):
        assert split.labels is not None
        lowest, highest = int(split.labels.min()), int(split.labels.max())
        if lowest < 0 or highest >= count:
            raise DataError(
                f"the {name} labels of {data.name} go from {lowest} to {highest}; {count} classes need "
                f"labels from 0 to {count - 1}. Number the classes without gaps."
            )


def model_notes(
    model: nn.Module | str, network: nn.Module, config: Config, new_classifier: bool
) -> list[str]:
    """What a user may not expect to happen to a model."""
    notes = []
    if new_classifier:
        notes.append(
            f"The pretrained weights of {model} know other classes than the data. The classifier is new, and "
            "the original is trained from these weights before it is the teacher."
        )
    if isinstance(model, nn.Module) and config.weights == "train":
        notes.append("The weights of the given model are not used: every network is trained from scratch.")
    elif config.inherits:
        steps = ["cut from the trained original"]
        steps += ["repaired"] if config.repairs else []
        steps += ["fine-tuned"] if config.train.epochs != 0 else []
        *others, last = steps
        notes.append(
            f"Every network is {', '.join(others)} and {last}." if others else f"Every network is {last}."
        )
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    if frozen and len(frozen) < len(list(network.parameters())):
        more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
        notes.append(
            f"Frozen parameters ({', '.join(frozen[:3])}{more}) are initialized and trained like all others."
        )
    return notes


def leave_out(
    data: Data, config: Config, task: Task, method: Method, *, is_compared: bool = False
) -> tuple[Data, Split | None, list[str]]:
    """The data without the training images that decide which of two networks is better, these, and notes.

    They are needed where weights are inherited (a cut may lose to the uniform one, and fine-tuning may lose
    what the repair gave), and by methods that judge networks. They are drawn once for all of it. A comparison
    always leaves them out: a method that is added later then finds the originals as they are.
    """
    is_judge = is_compared or (method.needs.held_out and config.plan is None)
    if not (config.inherits and task.train_fn is None) and not is_judge:
        return data, None, []
    size = data.train.size
    if isinstance(data.train, LoaderSplit) and not is_judge:
        return data, None, [_not_left_out("the loader chooses its samples itself")]
    most = MOST_JUDGES if is_judge else MOST_HELD_OUT
    rest, held_out = hold_out(data.train, min(HELD_OUT, most / max(1, size)), seed=0)
    if held_out.size < LEAST_HELD_OUT and not is_judge:
        return data, None, [_not_left_out(f"there are only {size}")]
    judge = "methods" if is_compared else f"the method {config.method_name}"
    purpose = f"for {judge} to judge by" if is_judge else "to choose the better network by"
    notes = [f"{held_out.size:,} of {size:,} training images are left out, {purpose}."]
    if is_judge and config.weights != "train":
        notes.append(
            f"The given weights may have been trained on the images that {judge} may judge networks by: they "
            "then look better than they are."
        )
    return replace(data, train=rest), held_out, notes


def _not_left_out(reason: str) -> str:
    return f"No training images are left out to choose the better network by: {reason}."


def name_of_recipe(config: Config, data: Data, network: nn.Module) -> str:
    if config.recipe != "auto":
        return config.recipe
    if config.inherits:
        is_small = data.is_own or isinstance(data.train, InMemoryImages)
        return "finetune" if is_small else "finetune-imagenet"
    if data.is_own:
        return "generic"
    if isinstance(data.train, InMemoryImages):
        return "digits" if data.name == "digits" else "cifar"
    source = str(info_of(network).source.get("zoo", type(network).__name__)).lower()
    is_mobile = any(word in source for word in ("mobile", "efficient", "mnas", "ghost", "shuffle"))
    return "imagenet-mobilenet" if is_mobile else "imagenet-resnet"


def resolve_distillation(config: Config, recipe: str, task: Task) -> Config:
    """The settings with numbers for what the loss of the slim network consists of, where they are not set."""
    terms = DISTILLATIONS[config.distill]
    if config.distill == "teacher" and not task.is_classification:
        terms = terms._replace(kd_weight=OUTPUT_WEIGHT)
    elif config.distill == "teacher" and recipe == "finetune" and task.loss is None:
        terms = FINE_TUNING
    chosen = {name: getattr(config, name) for name in terms._fields}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return replace(config, **{**terms._asdict(), **chosen}) if config.distill != "none" else config


def resolve_recipes(config: Config, name: str, data: Data, task: Task) -> Recipes:
    """The recipe of the final training, and that of networks that a method trains."""
    train = {key: value for key, value in asdict(config.train).items() if value is not None}
    own = {key: value for key, value in asdict(config.backbone).items() if value is not None}
    # Changes for the final training, except its length, hold for the backbone too.
    shared = {key: value for key, value in train.items() if key != "epochs"}
    if isinstance(data.train, DatasetSplit | LoaderSplit):
        shared["batch_size"] = train["batch_size"] = data.train.batch_size
        if name == "finetune" and task.optimizer is None:
            # The user chose the batch; its rate follows, down from that of the recipe.
            recipe = named_recipe(name)
            rate = recipe.lr * min(1.0, data.train.batch_size / recipe.batch_size)
            train, shared = {"lr": rate, **train}, {"lr": rate, **shared}
    if task.optimizer is not None:
        _refuse_rates({**shared, **own})
        # The schedule is a factor of the optimizer's own learning rates.
        shared |= {"lr": 1.0, "warmup_from": 0.0}
        train |= {"lr": 1.0, "warmup_from": 0.0}
    recipes = named_recipe(name).changed(**train), backbone_recipe(name).changed(**{**shared, **own})
    final, backbone = (
        recipe.changed(augment=data.augment) if recipe.augment == "auto" else recipe for recipe in recipes
    )
    return Recipes(final, backbone)


def _refuse_rates(given: Mapping[str, Any]) -> None:
    for name in ("lr", "momentum", "nesterov", "weight_decay", "decay_norms", "warmup_from"):
        if name in given:
            raise ConfigError(f"train.{name} has no effect with optimizer=: set it in the factory.")


def frozen_ties(network: nn.Module, graph: ChannelGraph, freeze: tuple[str, ...] | None) -> tuple[str, ...]:
    if freeze is not None:
        return freeze
    source = info_of(network).source.get("zoo", "")
    return tuple(tie for tie in zoo.FROZEN.get(source, ()) if tie in graph.widths)


def load_all(
    model: nn.Module | str,
    data: Data | str,
    weights: nn.Module | Mapping[str, Tensor] | str,
    config: Config,
    *,
    method: Method,
    task: Task,
    graph: ChannelGraph | None,
    callbacks: Sequence[Callback],
    is_compared: bool = False,
) -> Loaded:
    """Load and trace everything; nothing is written or trained yet."""
    seed_everything(derive_seed("original", config.seed))
    network, whole = load_model_and_data(model, data, config, weights)
    new_classifier = has_new_classifier(model, weights, whole)
    task = check_model(network, whole, task)
    graph = _graph_of(network, whole, config, graph)
    config, own_notes = restrict_settings(config, whole, task)
    recipe = name_of_recipe(config, whole, network)
    config = resolve_distillation(config, recipe, task)
    recipes = resolve_recipes(config, recipe, whole, task)
    config = replace(config, freeze=frozen_ties(network, graph, config.freeze))
    constraint = Constraint.of(
        graph,
        config.budget,
        resource=config.resource,
        divisor=config.divisor,
        freeze=config.freeze or (),
        grow=config.grow,
    )
    layer_macs = _layer_macs(network, graph, recipes.final.batch_size // config.accumulate)
    engine, notes = restrict_engine(_engine_of(config, layer_macs), whole, task)
    remaining, held_out, held_out_notes = leave_out(whole, config, task, method, is_compared=is_compared)
    fed = whole.normalization_notes(is_trained=config.weights != "train")
    known = model_notes(model, network, config, new_classifier)
    return Loaded(
        network,
        graph,
        remaining.to(engine.device),
        constraint,
        task,
        engine,
        config,
        recipes,
        method,
        weights,
        new_classifier,
        held_out if held_out is None else held_out.to(engine.device),
        callbacks if engine.world.is_main_process else (),
        [*whole.notes, *fed, *notes, *own_notes, *held_out_notes, *known, *latency_notes(graph)],
        subject=subject_of(graph, network, whole, engine, task, config.deterministic),
    )


def _graph_of(network: nn.Module, loaded: Data, config: Config, given: ChannelGraph | None) -> ChannelGraph:
    if given is not None and config.groups is not None:
        raise ConfigError("the given graph has its groups already: call graph.regroup(groups) yourself.")
    graph = given or trace(network, loaded.example(), groups=config.groups)
    return attach_latency(graph, config.latency)


def _engine_of(config: Config, layer_macs: float) -> Engine:
    return make_engine(
        config.device,
        workers=config.workers,
        deterministic=config.deterministic,
        accumulate=config.accumulate,
        compile=config.compile,
        sync_bn=config.sync_bn,
        threads=config.threads,
        layer_macs=layer_macs,
    )


def _layer_macs(network: nn.Module, graph: ChannelGraph, batch_size: int) -> float:
    """Multiply-adds of a forward pass, per layer."""
    layers = sum(parameter.ndim > 1 for parameter in network.parameters())
    return graph.macs() * batch_size / max(1, layers)
