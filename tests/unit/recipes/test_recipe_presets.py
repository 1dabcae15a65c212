"""The presets in the recipes' folders: each is a valid run, and does what its first lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloop.config.settings import check_components
from rayloop.run.config import read
from tests.support.runs import ROOT

PRESETS = sorted((ROOT / "recipes").glob("*/presets/*.yaml"))


def test_the_recipes_have_those_that_were_asked_for() -> None:
    names = {f"{path.parts[-3]}/{path.stem}" for path in PRESETS}
    assert {f"arc_vision/{name}" for name in ("safe", "recommended", "debug")} <= names
    assert {f"pyvision/{name}" for name in ("image", "video")} <= names
    assert {f"arpo/{name}" for name in ("tasks_128", "tasks_32", "single_machine")} <= names


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_preset_is_a_valid_run(path: Path) -> None:
    config = read(path, [])
    check_components(config)
    assert len(path.read_text(encoding="utf-8").splitlines()) < 35, "a few changes over a base"
    readme = (path.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"presets/{path.name}" in readme or f"presets/{path.stem}" in readme, "its README names it"


@pytest.mark.parametrize(
    ("preset", "rows", "epochs", "off"),
    [("arc_vision/presets/recommended", 900, 3, 16), ("arc_vision/presets/safe", 900, 3, 8), ("arpo/presets/tasks_128", 128, 15, 0),
     ("arpo/presets/tasks_32", 32, 15, 0), ("arpo/presets/single_machine", 8, 5, 0)],
)  # fmt: skip
def test_steps_make_the_epochs_that_are_named(preset: str, rows: int, epochs: int, off: int) -> None:
    config = read(ROOT / f"recipes/{preset}.yaml", [])
    assert abs(config.steps * config.algorithm.groups_per_step - rows * epochs) <= off


def test_pyvision_trains_the_published_numbers_of_trajectories() -> None:
    config = read(ROOT / "recipes/pyvision/pyvision.yaml", [])
    algorithm = config.algorithm
    assert (algorithm.target, algorithm.filtering.groups_per_generation, config.policy.update.mini_batches) == (512, 32, 4)
    assert config.environment.episode.max_tokens == 32000 + 20480
