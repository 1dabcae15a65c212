"""``python -m rayloop eval`` and ``export`` as a user meets them, on the checkpoint of a real run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

from rayloop.cli import main
from rayloop.cluster.stages.evaluate import Evaluator, NothingScored
from rayloop.cluster.stages.evaluate import evaluate as run_evaluation
from rayloop.core.groups import Member, Unscored, UnscoredKind
from rayloop.core.types import (
    EndReason,
    PromptImage,
    Sampling,
    Summary,
    Task,
    TrajectoryId,
    Version,
)
from rayloop.measure.controls import BLIND, OTHER, RIGHT, SAME, SAMPLED, Item
from rayloop.measure.protocol import Measurement
from rayloop.run.config import RunConfig
from rayloop.run.held_out import AnswerRequest, read_items
from rayloop.run.preflight import Prepared, prepare
from rayloop.run.records.jsonl import JsonLines
from tests.engines.prompts import engine, image, prompt, vision_tokens
from tests.support.runs import ROOT, finished, settings
from tests.support.storage import full

pytestmark = pytest.mark.timeout(600)
DATA = ROOT / "tests/data/grounding"
ROWS = 8
"""Held-out rows, each of a page type of its own."""


def untimed(file: Path) -> dict[tuple[str, str, int], Item]:
    """The items by key, without the moments at which their turns were asked for and came."""
    return {
        one.key: replace(one, turns=tuple({**turn, "times": []} for turn in one.turns))
        for one in read_items(file)
    }


def answers(
    items: Mapping[tuple[str, str, int], Item],
) -> dict[tuple[str, str, int], tuple[list[str], float | None]]:
    """The texts of each item's turns, and its reward."""
    return {
        key: ([turn["text"] for turn in item.turns], item.reward) for key, item in items.items()
    }


def grounding(folder: Path, model: Path) -> dict[str, Any]:
    """Two steps on screenshots with adapters; controls before and after."""
    return settings(
        folder,
        model,
        steps=2,
        data={
            "train": str(DATA / "train.jsonl"),
            "eval": str(DATA / "test.jsonl"),
            "reader": {"use": "rayloop.recipes.arc_vision.data:GroundingRows"},
        },
        policy__engine={"threads": 1, "lora": {"rank": 4}},
        policy__optimizer={"lr": 3.0e-3},
        weight_sync={"logprob_check": "stop"},
        evaluation={
            "every": 2,
            "samples": 2,
            "controls": True,
            "blind": {"use": "rayloop.recipes.arc_vision.boxes:BlindBox"},
        },
    )


def measurement(config: RunConfig) -> Measurement:
    """One greedy answer to each training row."""
    return Measurement(
        config=config.model_dump(mode="json", by_alias=True),
        checkpoint=None,
        data=config.data.train,
        samples=0,
        retries=0,
        benchmark="",
    )


def evaluate(config: dict[str, Any], out: Path, *options: str) -> int:
    file = out.parent / "eval.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = ("eval", str(file), "--out", str(out), "--controls", "--samples", "2", *options)
    return subprocess.run(
        [sys.executable, "-m", "rayloop", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    ).returncode


@pytest.mark.slow_faults
def test_a_checkpoint_is_measured_resumed_and_exported(
    tmp_path: Path, grounding_model: Path
) -> None:
    config = grounding(tmp_path, grounding_model)
    made = finished(config)
    controls = made.named("controls")
    assert [event["step"] for event in controls] == [0, 2]
    assert set(controls[0]["differences"]) == {BLIND, OTHER}, "no page type has two rows here"
    assert "right image minus control, paired:" in made.text
    kept = (made.folder / "evaluations/step_000002.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(kept) == ROWS * (3 + 2)
    assert (
        made.metrics[-1]["val/control/blind/reward/mean"]
        == controls[-1]["arms"][BLIND]["reward"][0]
    )

    (gain,) = made.named("gain")
    before, after = (made.named("evaluated")[n]["val_sampled/reward/mean"] for n in (0, -1))
    sampled = gain["rewards"]["sampled"]
    assert (gain["since"], sampled["tasks"], sampled["before"], sampled["after"]) == (
        0,
        ROWS,
        before,
        after,
    )
    assert sampled["gain"][0] == pytest.approx(after - before)
    assert f"held-out reward, sampled: {before:.3f} -> {after:.3f}, gain " in made.text
    assert made.metrics[-1]["val_sampled/scored"] == 2 * ROWS

    out, checkpoint = tmp_path / "eval", ("--checkpoint", str(made.folder))
    assert evaluate(config, out, *checkpoint) == 0
    lines = (out / "items.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    items = untimed(out / "items.jsonl")
    count = {
        arm: sum(item.arm == arm for item in items.values())
        for arm in (RIGHT, SAME, OTHER, SAMPLED)
    }
    assert count == {RIGHT: ROWS, SAME: 0, OTHER: ROWS, SAMPLED: 2 * ROWS}
    assert len(lines) == len(items)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["items"] == ROWS
    assert summary["arms"][RIGHT]["reward"][0] == pytest.approx(
        sum(items[RIGHT, t, 0].reward or 0 for t in tasks()) / ROWS
    )
    assert set(summary["arms"][BLIND]) == {"reward", "iou", "click", "format"}
    (out / "items.jsonl").write_text(
        "".join(lines[:10]) + lines[10][:20], encoding="utf-8"
    )  # killed while it wrote the eleventh
    assert evaluate(config, out, *checkpoint) == 0
    assert (out / "items.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[
        :10
    ] == lines[:10]
    assert untimed(out / "items.jsonl") == items
    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == summary
    assert evaluate(config, out) == 2, "the start model's answers do not belong here"

    exported = tmp_path / "exported"
    assert main(["export", str(made.folder), str(exported), "--dtype", "float32"]) == 0
    assert main(["export", str(made.folder), str(exported)]) == 2, "it is not empty now"
    assert (
        evaluate(
            {**config, "model": {**config["model"], "path": str(exported)}}, tmp_path / "again"
        )
        == 0
    )
    assert answers(untimed(tmp_path / "again/items.jsonl")) == answers(items), (
        "of the weights that the engines had"
    )
    assert not same_weights(exported / "model.safetensors", grounding_model / "model.safetensors")


def test_the_first_answer_without_a_score_is_named_and_its_traceback_kept(
    tmp_path: Path, digits_model: Path
) -> None:
    evaluator = Evaluator(RunConfig.model_validate(settings(tmp_path, digits_model)), str(tmp_path))
    for number in (1, 2):
        version, trace = Version(0, 0), f"Traceback\nKeyError: {number}"
        summary = Summary(
            TrajectoryId(-number, 0),
            0,
            f"t{number}",
            "",
            EndReason.DONE,
            9,
            3,
            1,
            0,
            0,
            True,
            version,
            version,
        )
        evaluator._report(
            Member(summary, Unscored(UnscoredKind.GRADER_ERROR, f"KeyError: {number}", trace))
        )
        evaluator._keep(
            Item(RIGHT, f"t{number}", "", 0, unscored=f"grader_error: KeyError: {number}"), {}
        )
    assert evaluator.why == "t1: grader_error: KeyError: 1"
    events = [
        json.loads(line)
        for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [event["traceback"] for event in events if event["event"] == "grader_error"] == [
        "Traceback\nKeyError: 1"
    ]


def test_an_evaluation_of_which_nothing_can_be_scored_ends_with_the_reason(
    tmp_path: Path,
    digits_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = RunConfig.model_validate(
        settings(tmp_path, digits_model, environment={"episode": {"max_prompt_tokens": 2}})
    )
    monkeypatch.setattr(
        "rayloop.cluster.stages.evaluate._evaluate_on_ray",
        lambda *_: "t1: over_long_prompt: the prompt has 9 tokens",
    )
    mended = config.model_copy(update={"seed": config.seed + 1})
    for one in (config, mended):  # a folder without an answer belongs to nobody
        with pytest.raises(
            NothingScored, match=r"none of \d+ answers has a score.*The first: t1: over_long_prompt"
        ):
            run_evaluation(
                prepare(one),
                measurement(one),
                tmp_path / "out",
                controls=True,
                address=None,
                temporary=None,
            )
        assert "shows an image: --controls has no wrong image to play" in capsys.readouterr().out
    assert not (tmp_path / "out/results.json").exists()


@pytest.mark.parametrize("name", ["identity.json", "summary.json", "results.json"])
def test_a_full_disk_leaves_the_files_of_the_former_evaluation_whole(
    tmp_path: Path,
    digits_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    config = RunConfig.model_validate(settings(tmp_path, digits_model))

    def play(prepared: Prepared, out: Path, missing: list[AnswerRequest], *_: Any) -> str:
        items = JsonLines(out / "items.jsonl")
        for one in missing:
            items.append(asdict(Item(one.arm, one.task.id, "", one.sample, reward=1.0)))
        items.close()
        return ""

    def evaluated() -> None:
        run_evaluation(
            prepare(config),
            measurement(config),
            tmp_path / "out",
            controls=False,
            address=None,
            temporary=None,
        )

    monkeypatch.setattr("rayloop.cluster.stages.evaluate._evaluate_on_ray", play)
    evaluated()
    file = tmp_path / "out" / name
    before = file.read_bytes()
    with full(len(before) - 1), pytest.raises(OSError, match="File too large"):
        evaluated()
    assert file.read_bytes() == before
    assert "0 of them on record" in capsys.readouterr().out


def test_answers_that_were_cut_are_played_again_with_twice_the_room(
    tmp_path: Path, digits_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three answers one needs 10 tokens, one 30, and one never ends; they get 8, then 16, then
    32.
    """
    needs, asked = {"short": 10, "long": 30, "endless": 10**6}, []

    async def play(missing: Any, player: Any, step: int, keep: Any, hear: Any) -> list[Item]:
        items = []
        for one in missing:
            asked.append((one.task.id, one.sampling.max_tokens))
            items.append(
                Item(
                    RIGHT,
                    one.task.id,
                    "",
                    0,
                    reward=1.0,
                    cut=one.sampling.max_tokens < needs[one.task.id],
                )
            )
            keep(items[-1], {})
        return items

    monkeypatch.setattr("rayloop.cluster.stages.evaluate.evaluate_answers", play)
    evaluator = Evaluator(RunConfig.model_validate(settings(tmp_path, digits_model)), str(tmp_path))
    evaluator.runner = None  # type: ignore[assignment]
    missing = [AnswerRequest(RIGHT, Task(name, ()), Sampling(0.0, max_tokens=8)) for name in needs]
    asyncio.run(evaluator._all(missing, 2))
    assert asked == [
        ("short", 8),
        ("long", 8),
        ("endless", 8),
        ("short", 16),
        ("long", 16),
        ("endless", 16),
        ("long", 32),
        ("endless", 32),
    ]
    assert [(item.task, item.cut) for item in read_items(tmp_path / "items.jsonl")] == [
        ("short", False),
        ("long", False),
        ("endless", True),
    ]
    asked.clear()
    asyncio.run(evaluator._all(missing, 0))
    assert len(asked) == 3


def test_plain_transformers_generates_what_our_engine_does(tmp_path: Path) -> None:
    shipped, exported, half = (
        ROOT / "recipes/arc_vision/tiny",
        tmp_path / "exported",
        tmp_path / "half",
    )
    assert main(["export", str(shipped), str(exported)]) == 0
    assert main(["export", str(exported), str(half), "--dtype", "bfloat16"]) == 0
    assert AutoModelForImageTextToText.from_pretrained(half, dtype="auto").dtype is torch.bfloat16
    assert same_weights(half / "model.safetensors", shipped / "model.safetensors")
    asked = [(f"Click on button {seed}.", image(168, 224, seed)) for seed in range(4)]
    answers = [our_engine(exported, *question) for question in asked]
    assert len(set(map(tuple, answers))) > 1, "the answers depend on the question"
    assert [plain_transformers(exported, *question) for question in asked] == answers


def tasks() -> list[str]:
    return [
        json.loads(line)["id"]
        for line in (DATA / "test.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def same_weights(left: Path, right: Path) -> bool:
    a, b = load_file(left), load_file(right)
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def plain_transformers(folder: Path, text: str, shown: PromptImage) -> list[int]:
    """12 greedy tokens by nothing but transformers (without its AutoProcessor, which wants
    torchvision).
    """
    model, processor = (
        AutoModelForImageTextToText.from_pretrained(folder),
        Qwen2VLImageProcessorPil.from_pretrained(folder),
    )
    ids = torch.tensor([prompt(folder, text, shown).token_ids])
    answer = model.generate(
        **processor(images=[Image.open(io.BytesIO(shown.data or b""))], return_tensors="pt"),
        input_ids=ids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        suppress_tokens=list(vision_tokens(folder)),
    )
    tokens: list[int] = answer[0, ids.shape[1] :].tolist()
    return tokens


def our_engine(folder: Path, text: str, shown: PromptImage) -> list[int]:
    async def go() -> list[int]:
        served = await engine(folder)
        greedy = Sampling(temperature=0.0, max_tokens=12, banned_tokens=vision_tokens(folder))
        try:
            return list((await served.generate(prompt(folder, text, shown), greedy)).token_ids)
        finally:
            served.close()

    return asyncio.run(go())
