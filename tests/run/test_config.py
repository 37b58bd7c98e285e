"""One config: flags, TOML files and keywords of `prune` are views of it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import peel
from helpers.small import small_run
from peel.cli.main import main
from peel.methods.registry import find_method
from peel.run.config import Config, make_config


def test_toml_and_back_is_the_same_config() -> None:
    config = make_config(
        {"budget": 0.3, "freeze": ["conv1"], "train": {"epochs": 3, "milestones": [0.5]}, "seed": 4}
    )
    assert make_config(tomllib.loads(config.to_toml())) == config


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "budget": st.sampled_from(["50%", 0.25, 10_000]),
            "methods": st.fixed_dictionaries(
                {
                    "peel": st.fixed_dictionaries(
                        {},
                        optional={
                            "rounds": st.integers(1, 5),
                            "ignore": st.lists(
                                st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8)
                            ),
                        },
                    )
                }
            ),
            "groups": st.dictionaries(st.text("ab x.", min_size=1), st.lists(st.text("cd.", min_size=1))),
            "backbone": st.fixed_dictionaries(
                {}, optional={"lr": st.floats(0, 1), "nesterov": st.booleans()}
            ),
            "skip_corrupt": st.booleans(),
        },
    )
)
def test_any_config_survives_toml(settings: dict[str, object]) -> None:
    settings = {"method": "peel", **settings}
    config = make_config(settings)
    assert make_config(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": [3]}, r"train is a table such as {epochs = 20}, not \[3\]\."),
        ({"x" * 10_000: 1}, r"there is no setting 'x+\.\.\.x+'\."),
        ({"seed": "3"}, "seed: expected int, not '3'"),
        ({"train": {"epochs": "many"}}, "train.epochs: expected int, not 'many'"),
        ({"train": {"epoch": 3}}, "no setting train.epoch. Did you mean epochs"),
        ({"metod": "peel"}, "no setting metod. Did you mean method"),
        ({"stages": ["originl"]}, "stages is one of original.*Did you mean original"),
        ({"distill": "none", "kd_weight": 0.1}, "kd_weight needs a teacher"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(settings: dict[str, object], words: str) -> None:
    with pytest.raises(peel.ConfigError, match=words):
        make_config(settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gamma_init": 1e308}, r"peel.gamma_init: expected float <= 1e\+30, not 1e\+308"),
        ({"rounds": 101}, "peel.rounds: expected int <= 100, not 101."),
        ({"rounds": 0}, "peel.rounds: expected int >= 1, not 0"),
        ({"rounds": True}, "peel.rounds: expected int, not True"),
        ({"criterio": "bn"}, "the method peel has no setting criterio. Did you mean criterion"),
        ({"criterion": "gradent"}, "no criterion is called 'gradent'. Did you mean gradient"),
        ({"policy": "importanse"}, "policy is one of importance.*Did you mean importance"),
        ({"backbone_ratio": 1.5}, "peel.backbone_ratio: expected float <= 1.0, not 1.5"),
        ({"l1_strength": 1.0, "l1_coefficient": 1.0}, "give one of them"),
        ({"policy": "random", "rounds": 2}, "does not use rounds"),
    ],
)
def test_a_wrong_setting_of_a_method_is_named_with_its_value(settings: dict[str, object], words: str) -> None:
    with pytest.raises(peel.ConfigError, match=words):
        find_method("peel", settings)


@pytest.mark.parametrize("name", ["criterion", "rounds"])
def test_the_old_name_of_a_setting_leads_to_the_new_one(name: str) -> None:
    with pytest.raises(
        peel.ConfigError, match=f"{name} is a setting of the method peel: --method peel --peel.{name}"
    ):
        make_config({name: 2, "method": "peel"})


def test_a_setting_of_another_method_is_refused() -> None:
    with pytest.raises(peel.ConfigError, match=r"peel.rounds is a setting of the method peel: --method peel"):
        make_config({"methods": {"peel": {"rounds": 2}}})


@pytest.mark.parametrize("settings", [{"groups": {"all": ["conv1"]}}, {"grow": True}])
def test_groups_and_growth_need_a_method(settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(peel.ConfigError, match=f'{name} needs method="peel" .--method peel.'):
        make_config(settings)
    assert make_config({**settings, "method": "peel"}).method == "peel"


def test_every_setting_is_a_flag_and_help_needs_no_torch() -> None:
    def helped(flag: str) -> str:
        program = f"import sys; from peel.cli import main; main(['run', '{flag}']); "
        program += "assert 'torch' not in sys.modules"
        done = subprocess.run(
            [sys.executable, "-c", program, flag], capture_output=True, text=True, check=True
        )
        return done.stdout

    assert len(helped("--help").splitlines()) <= 60, "it fits a screen"
    shown = helped("--help-all")
    for field in dataclasses.fields(Config):
        if field.name == "methods":  # --peel.rounds
            continue
        name = field.name.replace("_", "-")
        assert f"--{name}" in shown, name


def test_the_config_of_a_run_repeats_it_to_the_bit(tmp_path: Path, one_thread: None) -> None:
    flags = [
        "--train.epochs",
        "1",
        "--method",
        "peel",
        "--backbone.epochs",
        "1",
        "--budget",
        "40%",
        "--seed",
        "5",
        "--device",
        "cpu",
        "--data",
        "digits",
        "--bench-seconds",
        "0",
    ]
    assert main(["run", "helpers.small:Small", *flags, "--output", str(tmp_path / "first"), "--quiet"]) == 0
    config = str(tmp_path / "first" / "config.toml")
    assert main(["run", "--config", config, "--output", str(tmp_path / "second"), "--quiet"]) == 0
    first, second = ((tmp_path / name / "slim.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    # A flag overrides the file.
    assert (
        main(["run", f"--config={config}", "--seed", "6", "--output", str(tmp_path / "third"), "--quiet"])
        == 0
    )
    assert (tmp_path / "third" / "slim.safetensors").read_bytes() != first
    assert tomllib.loads((tmp_path / "third" / "config.toml").read_text())["seed"] == 6


def test_a_config_file_with_an_unknown_setting_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text("budgt = '50%'\n")
    assert main(["run", "--config", str(tmp_path / "config.toml"), "--output", str(tmp_path / "run")]) == 2
    assert "budgt" in capsys.readouterr().err
    assert main(["run", "--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_groups_can_be_given_in_a_config_file_and_as_flags(tmp_path: Path, one_thread: None) -> None:
    groups = {"first": ("conv1", "conv2"), "last": ("conv3", "conv4")}
    given = small_run(method="peel", groups=groups, stages=["plan"], output=tmp_path / "run")
    assert given.plan is not None
    assert given.plan.groups == groups
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["groups"] == {
        name: list(ties) for name, ties in groups.items()
    }
