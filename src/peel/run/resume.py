"""What may change between one start of a run and the next, what is said of it, and what is refused."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RunError

__all__ = ["NO_PATHS", "check_changes", "forced_notes", "what_is_fixed", "with_what_is_free"]

log = logging.getLogger("peel")

#: Settings that may change between one start of a run and the next: they do not change what is computed.
FREE = ("device", "steps", "train.retries", "search.retries")

#: Settings that may change too, as they are the way out where memory is short, but not without a word: batch norm sees the parts.
SAID = ("parts",)

#: A teacher that lies at a path is known by its weights, wherever that is; these are none.
TEACHER, NO_PATHS = "teacher", ("train", "pretrained", "given module")

#: What is said of a setting that nobody gave: where it comes from.
FROM = {
    "pad_channels": " (zero channels, which a GPU is faster with: go on with the kind of --device that began the run)"
}

#: What the network computes, in the words of torch: it tells whether the code of the model changed, unless it is torch that did.
OPERATORS, CONSTANTS = "original.operators", "original.constants"

#: Settings with which `--force` goes on although they changed: the rates and the like of the recipes, the images, the code of the model.
#: Others would leave a run whose parts do not fit: a plan of one budget beside a uniform network of another, trainings of different
#: lengths, labels that mean one class before and another after, or weights that have no place.
FORCED = (
    "train.",
    "search.",
    "input.",
    "data",
    "fingerprint",
    "images",
    "original.layers",
    OPERATORS,
    CONSTANTS,
    "sync_bn",
    "deterministic",
)
FIXED = (
    *(f"{recipe}.{name}" for recipe in ("train", "search") for name in ("epochs", "batch_size")),
    "input.classes",
    "input.shape",
)

#: Parts of the settings whose names are the program's own; others hold names of the user's, such as those of groups.
SECTIONS = ("original", "input", "method", "train", "search")


def check_changes(
    folder: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    begun: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    force: bool = False,
    option: str = "--output",
) -> dict[str, tuple[Any, Any]]:
    """An error where the run in the folder was begun with other settings than those of now; a word where its surroundings were others.

    With `force` it goes on with what may be forced: those settings, each with its old and new value, are returned. `option` is what the
    folder was named with.
    """
    _refuse_other_names(folder, before, now, begun.get("peel"), environment.get("peel"), force, option)
    changed = _difference(before, now)
    for name in [name for name in SAID if name in changed]:
        old, new = changed.pop(name)
        log.warning(
            "%s goes on with %s %s instead of %s: the bits will differ from those of a run without the change.",
            folder,
            name,
            new,
            old,
        )
    is_other_torch = begun.get("torch", environment.get("torch")) != environment.get("torch")
    if (
        OPERATORS in changed
        and is_other_torch
        and all(isinstance(operators, str) for operators in changed[OPERATORS])
    ):
        other = _other_operators(*changed.pop(OPERATORS))
        log.warning(
            "%s goes on with a torch that runs other operators where the model's code is the same: %s.",
            folder,
            other,
        )
    if is_other_torch and OPERATORS not in changed:
        changed.pop(CONSTANTS, None)  # it may call them with other numbers too
    if (
        "model" in changed
        and _is_moved(*changed["model"])
        and not any(name.startswith("original.") for name in changed)
    ):
        log.info(
            "%s goes on with the same model from another place: %s -> %s.", folder, *changed.pop("model")
        )
    if "data" in changed and before.get("fingerprint") and before["fingerprint"] == now.get("fingerprint"):
        log.info(
            "%s goes on with the same images from another place: %s -> %s.", folder, *changed.pop("data")
        )
    if changed and not (force and all(_may_be_forced(name) for name in changed)):
        raise RunError(
            f"{folder} was started with other settings:\n{_refusal(folder, changed, now, force, option)}"
        )
    if changed:
        log.warning(
            "%s goes on with other settings than it was started with, and its result will say so:\n%s",
            folder,
            _in_lines(changed),
        )
    # Another torch may round otherwise, and so may threads that share a sum. That is no reason to lose a run, but one to say so.
    for name in ("peel", "torch", *(["threads"] if now.get("device") == "cpu" else [])):
        if name in begun and begun[name] != environment.get(name):
            log.warning(
                "%s was begun with %s %s and goes on with %s: the bits may differ.",
                folder,
                name,
                begun[name],
                environment.get(name),
            )
    return changed


def _is_moved(old: Any, new: Any) -> bool:
    """Whether two names of models name the same function of a file of the same name, `./net.py:small` and `/home/me/net.py:small`."""
    return ".py:" in str(old) and Path(str(old)).name == Path(str(new)).name


def _may_be_forced(name: str) -> bool:
    return name not in FIXED and any(
        name == item or (item.endswith(".") and name.startswith(item)) for item in FORCED
    )


def _refuse_other_names(
    folder: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    old: str | None,
    new: str | None,
    force: bool,
    option: str,
) -> None:
    """Settings that only one of two versions of peel knows cannot be given to the other."""
    if ("method" in before) != ("method" in now):
        return  # a whole run and a teacher alone: they differ in more than the version
    found = list(_in_one_only(before, now))
    may_go_on = all(_may_be_forced(name) for _, name, _ in found)
    if not found or (force and may_go_on):
        return
    versions = f", {old}; this is {new}" if old and old != new else ""
    lines = [
        f"{folder} was begun by another version of peel{versions}. Its settings are not those of this one:",
        *(f"  {name}: {value!r} (only {where})" for where, name, value in found),
        f"Finish it with the version that began it, or name another {option} to start anew.",
    ]
    if may_go_on:
        lines.append("With --force it goes on where that is possible, and its result says so.")
    raise RunError("\n".join([*lines, *_what_can_be_used(folder, set())]))


def what_is_fixed(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings that tell one run from another."""
    return {
        name: what_is_fixed(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if f"{prefix}{name}" not in (*FREE, *SAID, OPERATORS, CONSTANTS)
    }


def with_what_is_free(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings that a run was begun with, but for those that may change: they are as they are now."""
    return {
        name: with_what_is_free(value, now.get(name) or {}, f"{prefix}{name}.")
        if isinstance(value, Mapping)
        else now.get(name, value)
        if f"{prefix}{name}" in (*FREE, *SAID, TEACHER)
        else value
        for name, value in before.items()
    }


def _difference(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Setting -> its old and new value, for those that differ."""
    before, after = json.loads(json.dumps(before)), json.loads(json.dumps(after))
    changed: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed.update(_difference(old, new, f"{prefix}{name}."))
        elif (
            old != new
            and f"{prefix}{name}" not in FREE
            and not (prefix + name == TEACHER and not {old, new} & {*NO_PATHS})
        ):
            changed[f"{prefix}{name}"] = (old, new)
    return changed


def _in_one_only(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Where a setting is that only one of the two has (`there` or `here`), its name and its value."""
    pairs = [("", before, after), *((f"{name}.", before.get(name), after.get(name)) for name in SECTIONS)]
    for prefix, old, new in pairs:
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from (
                ("there", prefix + name, value)
                for name, value in old.items()
                if name not in new and prefix + name not in FREE
            )
            yield from (
                ("here", prefix + name, value)
                for name, value in new.items()
                if name not in old and prefix + name not in FREE
            )


def _in_lines(changed: Mapping[str, Sequence[Any]]) -> str:
    """The settings that differ, each with its old and new value."""
    return "\n".join(f"  {_in_words(name, *pair)}{FROM.get(name, '')}" for name, pair in changed.items())


def _in_words(name: str, old: Any, new: Any) -> str:
    is_known = name == OPERATORS and isinstance(old, str) and isinstance(new, str)
    return f"{name}: {_other_operators(old, new) if is_known else f'{old!r} -> {new!r}'}"


def forced_notes(settings: Mapping[str, Any]) -> list[str]:
    """What was changed on the way of a run, and when: from its settings.json, a sentence for each time."""
    notes = []
    for change in settings.get("forced", []):
        changes = "; ".join(_in_words(name, *pair) for name, pair in change["changes"].items())
        stages = f"stages finished before: {', '.join(change['done']) or 'none'}; under way: {', '.join(change['begun']) or 'none'}"
        notes.append(f"The run went on with other settings (--force; {stages}): {changes}.")
    return notes


def _refusal(
    folder: Path,
    changed: Mapping[str, tuple[Any, Any]],
    settings: Mapping[str, Any],
    force: bool,
    option: str,
) -> str:
    """The settings that differ, and the way out."""
    lines = [_in_lines(changed)]
    roots = {name.partition(".")[0] for name in changed}
    stubborn = [name for name in changed if not _may_be_forced(name)]
    if "original" in roots and not roots & {"model", "data", "image_shape", "input"}:
        lines.append(
            f"What the network computes has changed: the code of {settings['model']}, or what it is built with, is not what it was. "
            f"Bring that back to go on with the run, or name another {option} to start anew."
        )
    else:
        lines.append(f"Give the same settings to go on with it, or another {option} to start anew.")
    if force:
        lines.append(
            f"--force does not change {', '.join(stubborn)}: what is done would not fit what is still to come."
        )
        lines.extend(
            _what_can_be_used(folder, roots | {name for name in changed if name.startswith("method.")})
        )
    elif not stubborn:
        lines.append("With --force it goes on all the same, and its result says so.")
    return "\n".join(lines)


def _what_can_be_used(folder: Path, changed: set[str]) -> list[str]:
    """What a run with other settings can take from this one."""
    found = []
    if (folder / "stages" / "original.record.json").exists() and not changed & {
        "model",
        "original",
        "image_shape",
        "input",
    }:
        found.append(f"--teacher {folder} its original")
    if (folder / "plan.json").exists() and not changed & {
        "model",
        "original",
        "method.budget",
        "method.resource",
    }:
        found.append(f"--plan {folder / 'plan.json'} its plan")
    return [f"Another run can use what this one has done: {', '.join(found)}."] if found else []


def _other_operators(old: str, new: str) -> str:
    """`relu 3 -> 2, silu 0 -> 1`: how often each operator ran before and runs now."""
    before, after = old.split(), new.split()
    often, now = Counter(before), Counter(after)
    counts = [
        f"{name} {often[name]} -> {now[name]}"
        for name in dict.fromkeys([*before, *after])
        if often[name] != now[name]
    ]
    if counts:
        return ", ".join(counts)
    place = next(i for i, name in enumerate(before) if name != after[i])
    return f"the same ones in another order, from number {place + 1} on ({before[place]} -> {after[place]})"
