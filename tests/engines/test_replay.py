"""``replay`` and ``bundle`` on a step that one rank has trained: equal to the record, what if, and
what is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayloop.cli import main
from rayloop.core.groups import Scored, Unscored, UnscoredKind
from rayloop.core.types import TrajectoryId
from rayloop.replay import bundle
from rayloop.replay.settings import foreign
from rayloop.run.folder import RunFolder
from rayloop.run.records import plain_files
from tests.support.recorded_steps import kept_step
from tests.support.runs import ROOT

TOKENS = 55
"""Sampled tokens of the members with an advantage: group 3 has none, one episode failed."""


@pytest.fixture(scope="module")
def kept(tiny_vlm: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with step 7 on record, which tests read only."""
    return kept_step(tmp_path_factory.mktemp("kept"), tiny_vlm)


@pytest.fixture
def run(kept: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of it that a test may change."""
    shutil.copytree(kept.path, tmp_path / "run")
    return RunFolder(tmp_path, "run")


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    """Exit code and JSON of ``replay``."""
    code = main(["replay", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The sentence with which a command ends; it printed nothing else."""
    assert main([*map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("rayloop: ConfigError: ")
    return printed.err


def changed(run: RunFolder, change: Callable[[Any], None]) -> None:
    """Change the plain values of step 7."""
    plain = plain_files.read(*run.rollouts.step_files(7))
    change(plain)
    run.rollouts.write_step(7, plain)


# Equal to the record -----------------------------------------------------------------------------

TWO_UPDATES = {"policy__update": {"epochs": 2, "mini_batches": 2}}
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "every term": {
        "policy__loss": {"kl_coef": 0.05, "entropy_coef": 0.01, "top_entropy_quantile": 0.5},
        **TWO_UPDATES,
    },
    "trajectories": {"policy__loss": {"kind": "gspo"}, **TWO_UPDATES},
    "a trajectory's weight": {
        "policy__loss": {"correction": {"level": "sequence", "action": "mask", "high": 2}}
    },
    "an adaptive KL in the loss": {
        "policy__loss": {"kl_coef": {"start": 0.01, "target": 0.05, "horizon": 1000}}
    },
    "turns": {"algorithm__advantage": {"kind": "gigpo"}, "environment__episode__max_turns": 4},
    "a scale over the step": {"algorithm__advantage": {"kind": "reinforce_pp"}},
    "a step that is cut": {
        "algorithm__groups_per_step": 2,
        "algorithm__filtering": {"filters": []},
    },
    "means of prompts": {"policy__loss": {"aggregation": "prompt-mean"}},
    "masked pictures": {"policy__loss": {"perception": {}}, **TWO_UPDATES},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_is_computed_again_bit_by_bit(
    name: str, tiny_vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = kept_step(tmp_path, tiny_vlm, **VARIANTS[name])
    code, found = replayed(capsys, made.path, "--step", "7")
    assert (code, found["equal"]) == (0, True)
    stages = found["stages"]
    assert stages["rewards"]["total"] == 11, "all that were played, of 12"
    assert stages["statuses"]["total"] == stages["advantages"]["total"] == 12
    assert stages["tokens"]["total"] >= 20
    assert stages["micro-batches"]["total"] >= 2
    assert found["rewards_as_recorded"] == ["its episode has no reward"]


def _other_reward(plain: Any) -> None:
    plain["groups"][0]["members"][1]["outcome"]["value"] = 0.25


def _other_advantage(plain: Any) -> None:
    credit = plain["groups"][0]["members"][1]["credit"]
    credit["advantage"] = float(np.nextafter(credit["advantage"], 9))


def _other_status(plain: Any) -> None:
    plain["groups"][2]["members"][1]["status"] = ["filtered", "overlong"]


def _other_logprob(plain: Any) -> None:
    turn = plain["groups"][0]["members"][1]["payload"]["turns"][1]
    turn["logprobs"] = turn["logprobs"] - np.eye(1, len(turn["logprobs"]), 2)[0]


def _other_loss(plain: Any) -> None:
    tokens = plain["ranks"][0]["updates"][0]["tokens"]
    tokens["loss"] = np.nextafter(tokens["loss"], np.float32(9))


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        (_other_reward, {"rewards"}),
        (_other_advantage, {"advantages"}),
        (_other_status, {"statuses"}),
        (_other_logprob, {"tokens", "micro-batches"}),
        (_other_loss, {"tokens"}),
    ],
)
def test_what_differs_from_the_record_is_found(
    run: RunFolder,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Any], None],
    stages: set[str],
) -> None:
    changed(run, change)
    code, found = replayed(capsys, run.path)
    differing = {name for name, count in found["stages"].items() if count["equal"] < count["total"]}
    assert code == 1
    assert differing == stages
    assert all(found["stages"][name]["differences"] for name in stages)


def test_the_loss_depends_on_the_masked_pictures_on_record(
    tiny_vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of the log-probs is changed: its token differs, and the micro-batch that has it."""
    made = kept_step(tmp_path, tiny_vlm, **VARIANTS["masked pictures"])

    def other_masked_logprob(plain: Any) -> None:
        masked = plain["ranks"][0]["updates"][0]["tokens"]["masked_logprobs"].copy()
        sees = np.flatnonzero(np.isfinite(masked))
        assert 0 < len(sees) < len(masked), "some tokens come before the first picture"
        masked[sees[0]] -= 1
        plain["ranks"][0]["updates"][0]["tokens"]["masked_logprobs"] = masked

    changed(made, other_masked_logprob)
    _, found = replayed(capsys, made.path)
    differing = {
        name: count["total"] - count["equal"]
        for name, count in found["stages"].items()
        if count["equal"] < count["total"]
    }
    assert differing == {"tokens": 1, "micro-batches": 1}


# What if -----------------------------------------------------------------------------------------


def test_another_advantage_changes_what_its_formula_says(
    kept: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = replayed(capsys, kept.path, "--step", "7", "algorithm.advantage=rloo")
    assert code == 0
    first = found["groups"][0]
    # Rewards 1, 0 and 0.5: GRPO's deviation is 0.5; leave-one-out is 3 / 2 of the distance.
    assert first["advantage"] == pytest.approx({"then": 1.0, "now": 0.75}, rel=1e-5)
    assert first["loss"]["now"] == pytest.approx(0.75 * first["loss"]["then"], rel=1e-4)
    assert len(found["tokens"]) == TOKENS
    assert found["stand_ins"] == 0
    token = next(one for one in found["tokens"] if (one["group"], one["sample"]) == (1, 0))
    assert token["advantage"] == pytest.approx({"then": 1.0, "now": 0.75}, rel=1e-5)


def test_a_clip_that_no_ratio_reaches_changes_nothing(
    kept: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = replayed(capsys, kept.path, "--step", "7", "policy.loss.clip_high=0.28")
    assert found["tokens"] == []
    assert found["loss"]["then"] == found["loss"]["now"]


def test_groups_that_were_not_trained_have_the_engines_log_probs(
    tiny_vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = kept_step(tmp_path, tiny_vlm, algorithm__groups_per_step=1)
    _, found = replayed(capsys, made.path, "--step", "7", "algorithm.filtering.ranking=fifo")
    then = [group["trained"]["then"] for group in found["groups"]]
    now = [group["trained"]["now"] for group in found["groups"]]
    assert (then, now) == ([1, 0, 0, 2], [3, 0, 0, 0])
    assert found["stand_ins"] > 0
    assert main(["replay", str(made.path), "--step", "7", "algorithm.filtering.ranking=fifo"]) == 0
    printed = capsys.readouterr().out
    assert "the engine's log-probs stand for the trainer's" in printed


def test_on_error_gives_grader_errors_a_number(
    tiny_vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = Unscored(UnscoredKind.GRADER_ERROR, "ValueError: seven")
    source = {"use": "tests.support.recorded_steps:raises_on_sevens"}
    outcomes = {TrajectoryId(2, 1): error}
    made = kept_step(tmp_path, tiny_vlm, outcomes, reward__source=source)
    code, found = replayed(capsys, made.path)
    assert (code, found["equal"]) == (0, True)
    _, found = replayed(capsys, made.path, "--step", "7", "reward.on_error=0")
    second = found["groups"][1]
    assert second["reward"] == pytest.approx({"then": 0.25, "now": 0.5 / 3})
    assert second["trained"] == {"then": 0, "now": 3}
    assert "1: excluded[grader_error] -> kept" in second["statuses"]
    # Where the source itself is not there, the outcome on record stays, and the reason is said.
    out = bundled(made, tmp_path)
    capsys.readouterr()
    _, found = replayed(capsys, out, "reward.on_error=0")
    assert found["groups"][1]["trained"] == {"then": 0, "now": 0}
    [reason] = found["rewards_as_recorded"]
    assert reason == f"{source['use']} is not a part of rayloop (--trust runs it)"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.update.epochs=2", "policy.update.epochs cannot be changed in a replay"),
        ("algorithm.group_size=2", "algorithm.group_size cannot be changed"),
        ("policy.loss.kl_coef=0.1", "no log-probs of a reference on record"),
        ("policy.loss.perception={}", "no log-probs with masked pictures on record"),
        ("policy.loss.clip_hihg=0.1", "clip_hihg"),
        ("algorithm.advantage=rlo", "algorithm.advantage"),
    ],
)
def test_what_a_record_cannot_answer_is_refused(
    kept: RunFolder, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    assert words in refused(capsys, "replay", kept.path, "--step", "7", override)


def test_a_step_that_was_not_kept_is_refused(
    run: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused(capsys, "replay", run.path, "--step", "6")
    assert "step 6 of run was not kept for a replay: step_000006.json" in said
    assert "Kept are the steps 7; train with keep_rollouts=all" in said
    out = tmp_path / "six.bundle"
    assert "was not kept" in refused(capsys, "bundle", run.path, "--step", "6", "--out", out)
    assert not out.exists()
    run.rollouts.step_files(7)[0].unlink()
    assert "No step was; train with keep_rollouts=all" in refused(capsys, "replay", run.path)


def test_a_restore_sets_the_steps_after_it_aside(run: RunFolder) -> None:
    plain = plain_files.read(*run.rollouts.step_files(7))
    run.rollouts.write_step(5, plain)
    assert run.rollouts.replayable() == [5, 7]
    run.rollouts.set_aside_after(5)
    assert run.rollouts.replayable() == [5]
    assert {file.name for file in run.rollouts.path.glob("*attempt*")} == {
        "step_000007.json.attempt-1",
        "step_000007.safetensors.attempt-1",
    }


def test_a_schema_that_is_not_known_and_damage_are_refused(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(run, lambda plain: plain.update(schema=9))
    assert "has schema 9 and this version of rayloop reads 1" in refused(capsys, "replay", run.path)
    changed(run, lambda plain: plain.update(schema=1, groups=[{}]))
    assert "is damaged: KeyError" in refused(capsys, "replay", run.path)
    run.rollouts.step_files(7)[1].write_bytes(b"half")
    assert "is damaged" in refused(capsys, "replay", run.path)


# A bundle ----------------------------------------------------------------------------------------


def bundled(run: RunFolder, folder: Path) -> Path:
    out = folder / "step.bundle"
    assert main(["bundle", str(run.path), "--step", "7", "--out", str(out)]) == 0
    return out


def repacked(path: Path, out: Path, **contents: bytes | None) -> Path:
    """The bundle with other members; None: without it."""
    with zipfile.ZipFile(path) as archive:
        every: dict[str, bytes | None] = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**every, **contents}.items():
            if content is not None:
                archive.writestr(name, content)
    return out


def test_a_bundle_is_replayed_where_nothing_else_is(
    kept: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Ray and transformers, in a folder with the file alone."""
    bundled(kept, tmp_path)
    assert "equals its record" in capsys.readouterr().out
    program = """
import sys
sys.modules["ray"] = sys.modules["transformers"] = None
from rayloop.cli import main
code = main(["replay", "step.bundle", "--json"])
assert not [name for name in sys.modules if name.split(".")[0] in ("vllm", "peft", "accelerate")]
sys.exit(code)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["equal"]
    assert found["stages"]["rewards"] == {"equal": 11, "total": 11, "differences": []}
    assert found["stages"]["tokens"] == {"equal": TOKENS, "total": TOKENS, "differences": []}
    assert os.listdir(tmp_path) == ["step.bundle"]


def test_a_bundle_names_nothing_of_the_machine(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_places(plain: Any) -> None:
        source = plain["config"]["reward"]["source"]
        source["with"] = {"key_file": "/keys/judge", "url": "http://10.0.0.1:8000"}
        outcome = plain["groups"][3]["members"][1]["outcome"]
        outcome |= {"trace": "Traceback", "reason": f"no {run.path}/x.png at {Path.home()}"}

    changed(run, with_places)
    out = tmp_path / "step.bundle"
    digest = bundle.write(run, 7, out)
    assert len(digest) == 64
    with zipfile.ZipFile(out) as archive:
        assert archive.namelist() == ["bundle.json", "step.json", "step.safetensors"]
        text = archive.read("step.json").decode()
    for part in (str(tmp_path), str(Path.home()) + " ", "/keys/judge", "10.0.0.1", "Traceback"):
        assert part not in text
    assert "no (removed)/x.png at (removed)" in text
    assert '"file": "recorded_steps.py"' in text, "of a file of this machine the name alone"
    assert ".png" not in text.replace("x.png", ""), "images are hashes"


def test_a_bundle_has_no_value_of_a_secret_variable(
    run: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789")
    changed(run, lambda plain: plain["groups"][0]["task"]["extra"].update(note="is sk-0123456789"))
    out = tmp_path / "step.bundle"
    said = refused(capsys, "bundle", run.path, "--step", "7", "--out", out)
    assert "the environment variable SOME_API_KEY" in said
    assert "sk-0123456789" not in said
    assert not out.exists()


def test_a_step_that_is_too_large_is_not_bundled(
    run: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(bundle.SIZE_LIMITS_BYTES, bundle.STRUCTURE, 1000)
    out = tmp_path / "step.bundle"
    said = refused(capsys, "bundle", run.path, "--step", "7", "--out", out)
    assert "and a bundle holds 1,000" in said
    assert not out.exists()


def test_odd_files_are_no_bundles(
    kept: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = bundled(kept, tmp_path)
    capsys.readouterr()
    odd = tmp_path / "odd"

    def said(**contents: bytes | None) -> str:
        return refused(capsys, "replay", repacked(good, odd, **contents))

    assert "it has '../../evil'" in said(**{"../../evil": b"x"})
    assert "it has '/etc/cron.d/x'" in said(**{"/etc/cron.d/x": b"x"})
    assert "a bundle has bundle.json, step.json" in said(**{"step.json": None})
    assert "was changed: step.json has another SHA-256" in said(**{"step.json": b"{}"})
    assert "was changed: step.safetensors" in said(**{"step.safetensors": b"{}"})
    assert "schema 9" in said(**{"bundle.json": b'{"schema": 9, "sha256": {}}'})
    assert "is not a bundle of rayloop: bundle.json" in said(**{"bundle.json": b"[" * 60_000})
    bomb = bytes(bundle.SIZE_LIMITS_BYTES["bundle.json"] + 1)
    assert "has more than 65,536 bytes; it is not read" in said(**{"bundle.json": bomb})
    odd.write_bytes(b"\x80\x04K\x01.")
    assert "is not a bundle of rayloop" in refused(capsys, "replay", odd)
    assert "is not a bundle of rayloop" in refused(capsys, "replay", tmp_path / "missing")
    assert "has step 7, not 8" in refused(capsys, "replay", good, "--step", "8")


def test_a_bundle_writes_no_file(
    kept: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A judge's cache, for example, would be a file wherever the bundle says.

    Nor is a judge shown a file that the bundle names.
    """
    judge = {"cache_file": str(tmp_path / "cache"), "key_file": "k"}
    source = {
        "use": "rayloop.judge.reward:JudgeReward",
        "with": {"judge": judge, "metrics_port": 1},
    }
    plain = bundle.plain_of(kept, 7)
    plain["config"]["reward"]["source"] = source
    image = {"path": "../../etc/passwd", "data": None, "size": None}
    plain["groups"][0]["task"]["messages"][0]["parts"].append(image)
    structure, _ = plain_files.split(plain)
    step = json.dumps(structure).encode()
    good = bundled(kept, tmp_path)
    with zipfile.ZipFile(good) as archive:
        about = json.loads(archive.read("bundle.json"))
    about["sha256"]["step.json"] = hashlib.sha256(step).hexdigest()
    contents = {"step.json": step, "bundle.json": json.dumps(about).encode()}
    path = repacked(good, tmp_path / "hostile", **contents)
    read = bundle.read(path)
    assert read.config["reward"]["source"]["with"] == {"judge": {}}
    assert [image.path for image in read.groups[0].task.images] == ["passwd"]
    capsys.readouterr()
    replayed(capsys, path)
    assert sorted(os.listdir(tmp_path)) == ["hostile", "step.bundle"]


def test_code_that_a_bundle_names_is_not_run(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def foreign_reward(plain: Any) -> None:
        plain["config"]["reward"]["source"] = {"use": "tests.support.recorded_steps:explodes"}

    changed(run, foreign_reward)
    bundle.write(run, 7, tmp_path / "reward.bundle")
    code, found = replayed(capsys, tmp_path / "reward.bundle")
    assert code == 0
    assert found["stages"]["rewards"]["total"] == 0
    assert any("is not a part of rayloop" in reason for reason in found["rewards_as_recorded"])

    def foreign_advantage(plain: Any) -> None:
        plain["config"]["algorithm"]["advantage"] = {"use": "tests.support.recorded_steps:explodes"}

    changed(run, foreign_advantage)
    bundle.write(run, 7, tmp_path / "advantage.bundle")
    said = refused(capsys, "replay", tmp_path / "advantage.bundle")
    assert "the bundle's algorithm has tests.support.recorded_steps:explodes" in said


def test_of_rayloops_modules_only_their_own_classes_are_its_parts() -> None:
    foreign_uses = [
        "mine:Reward",
        "rayloop.rewards.functions:as_source",
        "rayloop.rewards.scoring:InfrastructureFailure",
        "rayloop.rewards.mine.py:Reward",
        "rayloop.rewards.shaped:Missing",
        "rayloop.rewards",
    ]
    assert list(foreign([{"use": use} for use in foreign_uses])) == foreign_uses
    shipped = {
        "use": "rayloop.rewards.shaped:ShapedReward",
        "with": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
    }
    assert list(foreign({"source": shipped})) == []


# A judge -----------------------------------------------------------------------------------------


def test_a_judges_verdicts_are_those_on_record(
    tiny_vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No judge runs. One outcome has no verdict on record, and stays as it was."""
    source = {"use": "tests.support.recorded_steps:JudgedTwice"}
    outcomes = {
        TrajectoryId(1, 0): Scored(
            0.5,
            verdicts=({"key": "10", "value": 0.25, "components": {}, "flags": [], "reason": ""},),
        ),
        TrajectoryId(1, 1): Scored(0.75),
    }
    made = kept_step(tmp_path, tiny_vlm, outcomes, reward__source=source)
    code, found = replayed(capsys, made.path)
    assert (code, found["equal"]) == (0, True)
    assert found["stages"]["rewards"]["total"] == 1
    assert "the judge's verdict is not on record" in found["rewards_as_recorded"]
    assert "asks no judge" in refused(capsys, "replay", made.path, "--judge", "http://localhost:1")
