"""``python -m rayloop train`` as a user meets it: exit codes, the run folder, preemption, refusals,
what the processes hold.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rayloop.cli import main
from rayloop.config.settings import load
from rayloop.run.config import RunConfig
from tests.support.marks import Marks, marked, next_mark
from tests.support.runs import finished, ledger_closes, run, settings

pytestmark = pytest.mark.timeout(300)

LIGHT = ("DriverActor", "EnvironmentActor", "RewardActor")
HEAVY = ("RolloutActor", "PolicyRank")


def maps_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")


def with_evaluation(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "eval.jsonl").write_text(
        "".join(json.dumps({"id": f"e{i}", "digits": [i, 1]}) + "\n" for i in range(5)),
        encoding="utf-8",
    )
    config["data"]["eval"] = str(folder / "eval.jsonl")
    config["evaluation"] = {"every": 6, "limit": 4}
    return config


@pytest.mark.slow_faults
def test_a_run_is_preempted_while_it_generates_and_continues_without_a_logger_that_fails(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard has what metrics.jsonl has; when its folder cannot be opened, the run that
    continues does without.
    """
    marks = Marks(tmp_path / "marks")
    config = settings(
        tmp_path,
        digits_model,
        steps=6,
        checkpoint__every=6,
        reward__source__with={"seconds": 0.5},
        rollout__sampling={"max_tokens": 300, "min_tokens": 300},
        loggers=[{"kind": "tensorboard"}],
    )
    config = with_evaluation(marked(config, marks), tmp_path)
    with run(config) as made:
        made.until_event("trained", step=1)
        assert not [name for name in LIGHT for process in made.actors(name) if maps_torch(process)]
        assert all(maps_torch(made.actor(name)) for name in HEAVY), (
            "the check must be able to see torch"
        )
        assert main(["train", str(tmp_path / "run-0.yaml")]) == 2
        assert f"process {made.process.pid} on" in capsys.readouterr().err

        next_mark(made, marks, "reset", 8)
        os.killpg(made.process.pid, signal.SIGTERM)  # as timeout(1) sends it
        made.ends(75, deadline=30)
    done = made.metrics[-1]["step"]
    assert f"stopped at step {done} of 6, saved" in made.text
    assert made.named("preempted")[0]["ledger"]["in_flight"] > 0, (
        "the signal came while episodes were under way"
    )
    assert [e["step"] for e in made.named("checkpoint")] == [done]
    rewards = EventAccumulator(str(made.folder / "tensorboard")).Reload().Scalars("reward/mean")
    assert [event.step for event in rewards] == list(range(1, done + 1))
    assert rewards[-1].value == pytest.approx(made.metrics[-1]["reward/mean"])
    assert not made.named("logger_failed")

    (made.folder / "tensorboard").rename(tmp_path / "first")
    (made.folder / "tensorboard").write_text("no folder", encoding="utf-8")
    resumed = finished(config)
    assert [record["step"] for record in resumed.metrics] == list(range(1, 7))
    begin = resumed.named("begin")[1]
    assert (begin["lineage"], begin["restored"]) == (2, f"step_{done:06d}")
    counts = resumed.named("finished")[0]["ledger"]
    ledger_closes(counts)
    assert counts["trained"] == 6 * 8
    assert counts["attempts"] > 0, "what was in flight was issued again"
    assert {e["step"] for e in resumed.named("evaluated")} == {0, 6}
    for evaluated in resumed.named("evaluated"):
        assert (evaluated["val/scored"], evaluated["val/unscored"]) == (4, 0)
        assert evaluated["val/digits/reward/mean"] == evaluated["val/reward/mean"]

    (failed,) = resumed.named("logger_failed")
    assert (failed["logger"], failed["why"].partition(":")[0]) == ("tensorboard", "FileExistsError")
    assert "logger_failed" in resumed.text

    again = main(["train", str(tmp_path / "run-0.yaml"), "checkpoint.resume=never"])
    assert again == 2, "never continues nothing"


@pytest.mark.slow_faults
def test_a_run_goes_on_with_other_values_but_not_as_another_run(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_evaluation(settings(tmp_path, digits_model, steps=2), tmp_path)
    config["evaluation"]["every"] = 1
    made = finished(config)
    scores = [e["val/reward/mean"] for e in made.named("evaluated")]
    best = {"reward": max(scores), "step": scores.index(max(scores))}
    assert [e["val/best"] for e in made.named("evaluated")] == [
        max(scores[: i + 1]) for i in range(len(scores))
    ]

    before = (made.folder / "config.yaml").read_bytes()
    assert (
        main(["train", str(tmp_path / "run-0.yaml"), "steps=3", "policy.engine.lora.rank=4"]) == 2
    )
    assert "policy.engine.lora.rank was None and is 4. Set it back" in capsys.readouterr().err
    assert (made.folder / "config.yaml").read_bytes() == before
    umask = os.umask(0o027)
    try:
        assert main(["export", str(made.folder), str(tmp_path / "exported")]) == 0
    finally:
        os.umask(umask)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "exported").iterdir()}
    assert set(modes.values()) == {0o640}, modes

    config["steps"] = 3
    config["policy"]["optimizer"]["lr"] = 1.0e-5
    made = finished(config)
    assert made.named("begin")[1]["best"] == best
    [changed] = made.named("changed")
    assert changed["values"] == {"steps": [2, 3], "policy.optimizer.lr": [0.001, 1e-05]}
    assert "changed since step 2: steps 2 -> 3, policy.optimizer.lr 0.001 -> 1e-05" in made.text
    assert (made.folder / "config.yaml.attempt-1").read_bytes() == before
    assert made.metrics[-1]["actor/lr"] == pytest.approx(1e-5)
    assert made.metrics[-1]["val/best"] >= best["reward"]


@pytest.mark.parametrize("delay", [0.0, 0.15, 0.4, 1.0])
def test_a_signal_before_the_run_begins_leaves_nothing(
    tmp_path: Path, digits_model: Path, delay: float
) -> None:
    """Also while ray.init forks its daemons, where an exception raised by a signal handler may be
    lost.
    """
    with run(settings(tmp_path, digits_model)) as made:
        made.until(
            lambda: (
                (made.folder / "run.lock").exists()
                and (made.folder / "run.lock").read_text(encoding="utf-8")
            ),
            "the lock",
        )
        time.sleep(delay)
        made.process.send_signal(signal.SIGTERM)
        assert made.wait(30) == 1, made.text
        made.nothing_left_behind()
    assert (
        "NotSaved: stopped before anything was trained: there is nothing to save; run again to"
        " start over" in made.text
    )


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own for ``folder``. Skips where it cannot be mounted."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no right to mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow_faults
def test_a_full_disk_costs_checkpoints_until_it_is_too_much(
    tmp_path: Path, digits_model: Path
) -> None:
    config = settings(
        tmp_path, digits_model, steps=100, checkpoint={"every": 1}, recovery__start_timeout=60.0
    )
    folder = tmp_path / "run" / "checkpoints"
    with small_disk(folder, "4m"), run(config) as made:
        made.until_event("checkpoint", step=2)
        with (
            pytest.raises(OSError, match="No space left"),
            (folder / "ballast").open("wb") as ballast,
        ):
            ballast.write(bytes(4 * 2**20))
        made.until_event("checkpoint_failed", failures=1)
        (folder / "ballast").unlink()
        recovered = made.until(
            lambda: made.named("checkpoint")[-1]["step"] > 2 and made.named("checkpoint")[-1],
            "a save",
        )
        with (
            pytest.raises(OSError, match="No space left"),
            (folder / "ballast").open("wb") as ballast,
        ):
            ballast.write(bytes(4 * 2**20))
        made.ends(69)
        assert not list(folder.glob("*.tmp"))
        assert (folder / f"step_{recovered['step']:06d}" / "COMPLETE").exists()
    failures = [e["failures"] for e in made.named("checkpoint_failed")]
    last = failures[failures.index(1, 1) :]
    assert last == list(range(1, len(last) + 1)), "the save between has ended the first failures"
    assert len(last) >= 4, "training waits for the disk after so many"
    assert all("\n" not in e["why"] for e in made.named("checkpoint_failed")), (
        "what was wrong, not where in torch"
    )
    assert "were written, and 0 bytes are free" in made.text
    assert made.named("failed")[0]["error"] == "CheckpointStorageFailed"


# What needs no run --------------------------------------------------------------------------------


def written(folder: Path, model: Path, **changes: Any) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings(folder, model, **changes)), encoding="utf-8")
    return str(path)


def test_print_config_shows_a_configuration_that_loads_to_the_same(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, digits_model)
    assert main(["train", path, "steps=7", "--print-config"]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load(shown, [], RunConfig) == load(Path(path), ["steps=7"], RunConfig)
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_more_gpus_than_there_are(
    tmp_path: Path, digits_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, digits_model, policy__ranks=4, policy__placement={"num_gpus": 1})
    assert main(["train", path]) == 69  # another machine may have them
    assert (
        "ResourcesUnavailable: the run needs 4 GPUs, this machine has 0" in capsys.readouterr().err
    )
    assert (tmp_path / "run" / "run.lock").read_text(encoding="utf-8") == ""


CROSS_FIELD = [
    ({"algorithm.group_size": 1}, ["algorithm.group_size is 1"]),
    (
        {"rollout.deterministic": True, "algorithm.staleness": {"max_staleness": 3}},
        ["rollout.deterministic", "max_staleness: 3"],
    ),
    ({"policy.update": {"mini_batches": 5}}, ["mini_batches (5)", "only 2 groups"]),
    ({"evaluation": {"every": 3}}, ["data.eval"]),
    (
        {"environment.episode": {"max_prompt_tokens": 90, "max_tokens": 95}},
        ["max_prompt_tokens (90)", "max_tokens (8)", "98", "episode.max_tokens (95)"],
    ),
    (
        {
            "algorithm.filtering": {
                "groups_per_generation": 1,
                "max_generation_batches": 1,
                "min_fraction": 0.75,
            }
        },
        ["1 generation batches of 1 groups", "4 trajectories at most", "6 of 8"],
    ),
]


@pytest.mark.parametrize(
    ("changes", "words"), CROSS_FIELD, ids=[" ".join(changes) for changes, _ in CROSS_FIELD]
)
def test_what_cannot_work_together_is_refused_with_the_numbers(
    changes: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    digits_model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = written(
        tmp_path, digits_model, **{key.replace(".", "__"): value for key, value in changes.items()}
    )
    assert main(["train", path]) == 2
    message = capsys.readouterr().err
    assert message.startswith("rayloop: ConfigError: ")
    assert [word for word in words if word not in message] == []
