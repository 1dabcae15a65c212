"""Bad rows, images, prompts, rewards and environments in a real run: named, left out and counted,
never a reward.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ROOT, Run, finished, ledger_closes, settings

pytestmark = pytest.mark.timeout(400)

GOOD = ROOT / "tests/data/grounding"


def png_header(path: Path, width: int, height: int) -> str:
    """An image of this size as far as its header says; a few bytes on disk."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )
    return str(path)


def grounding(folder: Path, model: Path, lines: list[str], **changes: Any) -> dict[str, Any]:
    """A run on grounding rows, in their order; good rows and the given lines take turns."""
    good = []
    for line in (GOOD / "train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        good.append(json.dumps({**row, "image": str(GOOD / row["image"])}))
    assert len(lines) < len(good)
    mixed = [line for pair in zip(good, lines, strict=False) for line in pair]
    (folder / "train.jsonl").write_text(
        "\n".join(mixed + good[len(lines) :]) + "\n", encoding="utf-8"
    )
    reader = {
        "use": "rayloop.recipes.arc_vision.data:GroundingRows",
        "with": {"prompt": "{instruction}"},
    }
    return settings(
        folder,
        model,
        data__reader=reader,
        data__order="file",
        data__anywhere=True,
        model__max_pixels=37632,
        model__min_pixels=37632,
        rollout__sampling={"max_tokens": 24, "min_tokens": 24},
        checkpoint__every=100,
        **changes,
    )


def row(name: str, image: str, instruction: str = "Click.", **other: Any) -> str:
    return json.dumps(
        {
            "id": name,
            "image": image,
            "instruction": instruction,
            "bbox": [0.1, 0.1, 0.5, 0.5],
            **other,
        }
    )


def hung_trajectory(made: Run) -> str:
    return str(next(e["trajectory"] for e in made.named("episode_failed") if "hangs" in e["why"]))


@pytest.mark.slow_faults
def test_whatever_is_wrong_with_a_task_the_steps_are_done(
    tmp_path: Path, grounding_model: Path
) -> None:
    fine = str(GOOD / "images/train/click-button-0000.png")
    corrupt, missing = tmp_path / "corrupt.png", tmp_path / "missing.png"
    corrupt.write_bytes(Path(fine).read_bytes()[:300])
    bomb = png_header(tmp_path / "bomb.png", 30_000, 30_000)
    lines = [
        row("missing", str(missing)),
        '{"id": "torn", "image": ',
        row("bad-box", fine, bbox=[0.5, 0.1, 0.1, 0.5]),
        row("corrupt", str(corrupt)),
        row("bomb", bomb),
        row("long", fine, "Click on the button. " * 400),
        row("hangs", fine),
        row("raises", fine),
        *(row(name, fine) for name in ("nan", "inf", "none", "string", "half", "crash")),
    ]
    config = grounding(tmp_path, grounding_model, lines, steps=9)
    episode = config["environment"]["episode"]
    episode |= {"max_prompt_tokens": 300, "step_timeout": 1.5}
    episode["environment"]["with"] = {"reset": {"hangs": "hang"}, "step": {"raises": "raise"}}
    config["reward"]["source"]["with"]["faults"] = {
        n: n for n in ("nan", "inf", "none", "string", "half")
    } | {"crash": "raise"}
    made = finished(config)

    assert [record["step"] for record in made.metrics] == list(range(1, 10))
    quarantine = {record["path"]: record["reason"] for record in made.records("quarantine")}
    data = str(tmp_path / "train.jsonl")
    assert "JSON" in quarantine[f"{data}:4"]
    assert "bbox" in quarantine[f"{data}:6"]
    assert "cannot be read" in quarantine[f"{data}:2"]
    assert "truncated or corrupt" in quarantine[f"{data}:8"]
    assert "missing.png" in quarantine[f"{data}:2"]
    assert "900000000 pixels" in quarantine[f"{data}:10"]
    assert "the limit is 50000000 pixels" in quarantine[f"{data}:10"]
    assert f"{data}:16" not in quarantine, "one group in which it raised may be chance"
    assert "episodes of its group hung" in quarantine[f"{data}:14"]
    assert len(quarantine) == 6, quarantine

    counts = made.named("finished")[0]["ledger"]
    ledger_closes(counts)
    assert counts["trained"] == 9 * 8
    [probe] = made.named("probe_failed")
    assert probe["task"] == "missing", (
        "the log-prob check plays the first tasks, and meets it before the first group does"
    )
    assert counts["excluded[bad_data]"] == 2 * 4
    assert counts["excluded[over_long_prompt]"] == 4
    assert counts["excluded[invalid_reward]"] == 4 * 4
    assert counts["excluded[grader_error]"] == 4
    [crashed] = made.named("grader_error")
    assert crashed["why"] == "KeyError: 'no column for crash'"
    assert "in score" in crashed["traceback"]
    assert made.text.count("Traceback (most recent call last)") == 1, made.text
    assert {e["outcome"] for e in made.named("unscored")} >= {
        "invalid_reward",
        "grader_error",
        "bad_data",
    }
    assert counts["filtered[all_equal]"] == 4
    assert counts["excluded[environment_failure]"] == 2 * 4
    assert all(record["reward/min"] > 0 for record in made.metrics), (
        "a failure became a reward of 0"
    )
    hung = [e for e in made.named("worker_lost", role="environment") if "reset" in e["why"]]
    assert 2 <= len(hung) <= 3, (
        "the process of a hung environment is ended, until two of them have shown that the task"
        " hangs"
    )
    assert all("hangs gave no answer within 1.5 seconds" in e["why"] for e in hung)
    assert 1 <= len(made.named("episode_failed", trajectory=hung_trajectory(made))) <= 3


@pytest.mark.slow_faults
def test_a_grader_that_always_raises_stops_the_run_with_its_traceback(
    tmp_path: Path, digits_model: Path
) -> None:
    made = finished(
        settings(tmp_path, digits_model, reward__source__with={"faults": {"*": "raise"}}), code=1
    )
    assert (
        "GraderBroken: the reward tests.support.rewards:TokenReward raised on each of the 4"
        " trajectories" in made.text
    )
    assert "KeyError: 'no column for train-" in made.text
    [failed] = made.named("failed")
    assert failed["error"] == "GraderBroken"
    assert made.metrics == []


@pytest.mark.slow_faults
def test_groups_that_never_differ_stop_the_run_with_the_counts(
    tmp_path: Path, digits_model: Path
) -> None:
    config = settings(tmp_path, digits_model, reward__source__with={"faults": {"*": "half"}})
    made = finished(config, code=1)
    assert "GenerationBudgetSpent: 0 of 8 trajectories survived 4 generation batches" in made.text
    assert "filtered[all_equal] 32" in made.text
    [failed] = made.named("failed")
    assert failed["error"] == "GenerationBudgetSpent"
    assert "was answered '" in made.text
    assert (
        len((made.folder / "rollouts/step_000001.jsonl").read_text(encoding="utf-8").splitlines())
        == 4 * 4
    ), "keep_rollouts groups"
    assert failed["ledger"]["filtered[all_equal]"] == 32
    ledger_closes(failed["ledger"])
    assert made.metrics == []
