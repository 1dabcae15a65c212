"""The presets in the recipes' folders: each is a valid run, and does what its first lines say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from rayloop.chat.rendering import Renderer
from rayloop.config.settings import check_components
from rayloop.core.groups import Group
from rayloop.data.dataset import Dataset
from rayloop.grpo.advantage import CheckedAdvantage, build_advantage, with_advantages
from rayloop.grpo.filters import build_filters
from rayloop.grpo.losses.policy import Denominator, token_weights
from rayloop.grpo.selection import apply_filters, select
from rayloop.run.config import read
from tests.support.losses import policy_loss
from tests.support.pictures import picture
from tests.support.runs import ROOT
from tests.unit.groups import make_group

PRESETS = sorted((ROOT / "recipes").glob("*/presets/*.yaml"))
LARGE = [
    ROOT / f"recipes/{name}.yaml"
    for name in (
        "arc_vision/arc_vision",
        "arpo/arpo",
        "arpo/osworld",
        "pyvision/pyvision",
        "pyvision/deepeyes",
        "chart_rvr/chart_rvr",
    )
]
"""What the presets are changes of."""


def named(path: Path) -> str:
    return f"{path.parts[-3]}-{path.stem}"


def scored(number: int, rewards: list[float], rules: CheckedAdvantage) -> Group:
    return with_advantages(make_group(number, rewards), rules)


def test_the_recipes_have_those_that_were_asked_for() -> None:
    names = {f"{path.parts[-3]}/{path.stem}" for path in PRESETS}
    assert {f"arc_vision/{name}" for name in ("safe", "recommended", "debug")} <= names
    assert {f"pyvision/{name}" for name in ("image", "video")} <= names
    assert {f"arpo/{name}" for name in ("tasks_128", "tasks_32", "single_machine")} <= names


@pytest.mark.parametrize("path", PRESETS, ids=named)
def test_a_preset_is_a_valid_run(path: Path) -> None:
    config = read(path, [])
    check_components(config)
    assert len(path.read_text(encoding="utf-8").splitlines()) < 35, "a few changes over a base"
    readme = (path.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"presets/{path.name}" in readme or f"presets/{path.stem}" in readme, (
        "its README names it"
    )


@pytest.mark.parametrize(
    ("preset", "rows", "epochs", "off"),
    [
        ("arc_vision/arc_vision", 900, 3, 16),
        ("arc_vision/presets/recommended", 900, 3, 16),
        ("arc_vision/presets/safe", 900, 3, 8),
        ("arc_vision/presets/optimised", 900, 3, 16),
        ("arpo/presets/tasks_128", 128, 15, 0),
        ("arpo/presets/tasks_32", 32, 15, 0),
        ("arpo/presets/single_machine", 8, 5, 0),
    ],
)
def test_steps_make_the_epochs_that_are_named(
    preset: str, rows: int, epochs: int, off: int
) -> None:
    """Of what is trained.

    Where other rows take the place of groups that are left out, more of them are played, and it
    says so.
    """
    path = ROOT / f"recipes/{preset}.yaml"
    config = read(path, [])
    assert abs(config.steps * config.algorithm.groups_per_step - rows * epochs) <= off
    filtering = config.algorithm.filtering
    replaces = bool(filtering.filters) and filtering.max_generation_batches > 1
    assert ("or more" in path.read_text(encoding="utf-8")) == replaces


@pytest.mark.parametrize(
    "preset",
    [
        "arc_vision/presets/faithful",
        "arpo/presets/faithful",
        "arpo/presets/faithful_32",
        "arpo/presets/tasks_128",
        "arpo/presets/tasks_32",
        "arpo/presets/single_machine",
        "pyvision/presets/deepeyes_faithful",
        "pyvision/presets/deepeyes_faithful_32b",
        "chart_rvr/presets/faithful",
        "chart_rvr/presets/paper",
        "chart_rvr/presets/safe",
        "chart_rvr/presets/ultra_fast",
    ],
)
def test_every_group_of_a_step_is_trained_once(preset: str) -> None:
    """The originals replace no group, so that a number of steps is a number of rows; equal rewards
    are all the same to them.
    """
    algorithm = read(ROOT / f"recipes/{preset}.yaml", []).algorithm
    size, target, settings = algorithm.group_size, algorithm.target, algorithm.filtering
    groups = [
        scored(number, [1.0] * size, build_advantage(algorithm.advantage))
        for number in range(algorithm.groups_per_step)
    ]
    kept = [apply_filters(group, build_filters(settings.filters)) for group in groups]
    assert sum(len(group.kept) for group in select(kept, target, settings).train) == target


@pytest.mark.parametrize("path", [path for path in PRESETS if "faithful" in path.stem], ids=named)
def test_the_trainers_own_logprobs_are_the_old_ones(path: Path) -> None:
    """The originals compute them anew with the trainer, and weigh no token by how far the engine's
    are from these.
    """
    settings = read(path, []).policy.loss
    logprobs, old_logprobs = (
        torch.tensor([-1.0, -2.0], requires_grad=True),
        torch.tensor([-1.0, -2.0]),
    )
    rollout_logprobs, advantage = torch.tensor([-1.5, -1.5]), torch.tensor([1.0, 0.5])
    ref_logprobs = old_logprobs if settings.kl_coef else None
    entropy = torch.zeros(2) if settings.entropy_coef else None
    policy_loss(
        logprobs,
        old_logprobs,
        rollout_logprobs,
        advantage,
        settings,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
    ).loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantage)


@pytest.mark.parametrize("preset", ["faithful", "faithful_32"])
def test_arpo_averages_within_a_trajectory_first(preset: str) -> None:
    """Its micro batch is one trajectory: a mean over its tokens, then a mean over micro batches and
    ranks (verl's dp_actor.py).
    """
    settings = read(ROOT / f"recipes/arpo/presets/{preset}.yaml", []).policy.loss
    lengths = [3, 5, 40]
    trajectory_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    losses = torch.arange(float(sum(lengths)))
    published = sum(part.mean() for part in losses.split(lengths)) / len(lengths)
    ours = (
        token_weights(trajectory_ids, settings, Denominator(sum(lengths), len(lengths))) * losses
    ).sum()
    torch.testing.assert_close(ours, torch.as_tensor(published))


@pytest.mark.parametrize(
    "path", [*LARGE, *PRESETS, *(ROOT / "recipes/presets").glob("*.yaml")], ids=named
)
def test_no_large_model_in_bfloat16_is_perturbed_at_the_start(path: Path) -> None:
    """The self-test is for small models or float32; ``warn`` makes it, too, and goes on."""
    config = read(path, [])
    size = re.search(r"-(\d+)B", config.model.path)
    assert (
        not (config.rounds and size and int(size[1]) > 1)
        or config.weight_sync.logprob_check == "stop"
    )
    assert size or "tiny" in config.model.path or "loose" in config.model.path, "of a known size"


HELD_OUT = {
    "vstar": {
        "id": "1",
        "image": "a.png",
        "question": "Which? (A) red",
        "answer": "A",
        "kind": "direct_attributes",
    },
    "screenspot": {
        "id": "1",
        "page": "web",
        "image": "a.png",
        "instruction": "Open it.",
        "bbox": [0.1, 0.1, 0.2, 0.2],
    },
    "osworld": {"id": "1", "prompt": "Open it.", "osworld": "chrome/1", "data_source": "chrome"},
}
"""Folder of ``data.eval`` -> a row as ``data prepare`` writes it."""


@pytest.mark.parametrize("path", PRESETS, ids=named)
def test_held_out_rows_fit_what_the_preset_asks(path: Path, tmp_path: Path) -> None:
    """The first held-out row is read by the preset's reader and rendered; what is evaluated has
    rows.
    """
    config = read(path, [])
    if config.data.eval is None:
        assert not config.evaluation.every
        return
    file = ROOT / config.data.eval
    if not file.is_relative_to(ROOT / "recipes"):  # what is shipped
        file = tmp_path / "rows.jsonl"
        file.write_text(
            json.dumps(HELD_OUT[Path(config.data.eval).parent.name]) + "\n", encoding="utf-8"
        )
        (tmp_path / "a.png").write_bytes(picture(96, 64))
    task = next(iter(Dataset(str(file), config.data.reader.build(), True, print)))
    model = config.model.model_copy(update={"path": str(ROOT / "recipes/pyvision/tiny")})
    assert len(Renderer(model).prompt(task.messages).token_ids) > 1


def test_deepeyes_32b_differs_from_7b_where_its_script_does() -> None:
    """An engine is spread over four GPUs, and the images of 20 turns have room."""
    small, large = (
        read(ROOT / f"recipes/pyvision/presets/deepeyes_faithful{size}.yaml", [])
        for size in ("", "_32b")
    )
    assert large.rollout.engine.model_dump()["extra"] == {
        **small.rollout.engine.model_dump()["extra"],
        "tensor_parallel_size": 4,
    }
    assert (large.model.path, large.rollout.placement.num_gpus) == (
        "Qwen/Qwen2.5-VL-32B-Instruct",
        4,
    )
    assert (large.environment.episode.max_turns, large.environment.episode.max_images) == (20, 21)
    assert (large.algorithm, large.reward, large.policy.loss) == (
        small.algorithm,
        small.reward,
        small.policy.loss,
    )


def test_pyvision_trains_the_published_numbers_of_trajectories() -> None:
    config = read(ROOT / "recipes/pyvision/pyvision.yaml", [])
    algorithm = config.algorithm
    assert (
        algorithm.target,
        algorithm.filtering.groups_per_generation,
        config.policy.update.mini_batches,
    ) == (512, 32, 4)
    assert config.environment.episode.max_tokens == 32000 + 20480
