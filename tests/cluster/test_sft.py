"""The supervised stage as a command: its losses, its files, its number of workers, and what happens
when one dies.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from rayloop.cluster.stages.sft import CHECKPOINTS, RUN, _identity, sft
from rayloop.core.types import derive
from rayloop.data.dataset import Dataset
from rayloop.engines.settings import ModelSettings
from rayloop.engines.training.scorer import FrozenScorer
from rayloop.recipes.digits.prepare import main as prepare
from rayloop.sft.stage import Examples, SftConfig, SftProgress, make_tiny
from tests.support.runs import ROOT, TAG, eventually, tagged
from tests.support.storage import keeps_folders

pytestmark = pytest.mark.timeout(900)

STEPS, DEADLINE = 8, 280.0


def config(folder: Path, model: Path, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "output": str(folder / name),
        "steps": STEPS,
        "batch_size": 8,
        "log_every": 1,
        "model": {"path": str(model)},
        "data": {
            "train": str(folder / "train.jsonl"),
            "reader": {"use": "rayloop.recipes.digits.data:DigitRows"},
        },
        "answers": {"use": "rayloop.recipes.digits.data:SortedAnswers"},
        "engine": {"threads": 1},
        "optimizer": {"lr": 3.0e-3, "warmup_steps": 2, "schedule": "wsd"},
        **changes,
    }


@dataclass
class Stage:
    process: subprocess.Popen[bytes]
    output: Path
    log: Path
    tag: str

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace", encoding="utf-8")

    @property
    def losses(self) -> list[float]:
        return [float(loss) for loss in re.findall(r"(?<!held-out )loss (\S+)", self.text)]

    @property
    def held_out(self) -> dict[int, float]:
        """Step -> held-out loss, as the progress has them."""
        text = (self.output / RUN / "progress.txt").read_text(encoding="utf-8")
        return {
            int(step): float(loss)
            for step, loss in re.findall(r"step (\d+)  held-out loss (\S+)", text)
        }

    @property
    def weights(self) -> dict[str, Tensor]:
        return load_file(self.output / "model.safetensors")

    @property
    def worker(self) -> psutil.Process:
        found = [
            p for p in tagged(self.tag) if "".join(p.cmdline()).startswith("ray::RayTrainWorker")
        ]
        return found[0]

    def has_checkpoint(self) -> None:
        """Wait until Ray Train knows of one."""
        snapshot = self.output / RUN / CHECKPOINTS / "checkpoint_manager_snapshot.json"
        eventually(
            lambda: snapshot.exists() or self.process.poll() is not None,
            lambda: f"a checkpoint\n{self.text}",
            DEADLINE,
        )
        assert self.process.poll() is None, self.text

    def ends(self, code: int) -> None:
        assert self.process.wait(DEADLINE) == code, self.text
        eventually(lambda: not tagged(self.tag), "the stage's processes end", 10)


@contextmanager
def started(settings: dict[str, Any]) -> Iterator[Stage]:
    tag, output = uuid.uuid4().hex, Path(settings["output"])
    path, log = output.with_suffix(".yaml"), output.with_suffix(".log")
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with (
        tempfile.TemporaryDirectory(prefix="", ignore_cleanup_errors=True) as temporary,
        log.open("wb") as file,
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "rayloop", "sft", str(path)],
            cwd=ROOT,
            env={**os.environ, TAG: tag, "TMPDIR": temporary, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Stage(process, output, log, tag)
        finally:
            for left in tagged(tag):
                left.kill()
            process.wait(10)


def ended(settings: dict[str, Any], code: int = 0) -> Stage:
    with started(settings) as stage:
        stage.ends(code)
    return stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sft")
    prepare(["--out", str(made)])
    return made


@pytest.fixture(scope="module")
def undisturbed(folder: Path, digits_model: Path) -> Stage:
    return ended(config(folder, digits_model, "undisturbed", save_every=4, checkpoint_every=100))


@pytest.mark.slow_faults
@pytest.mark.slow
def test_a_stage_lowers_the_loss_and_writes_model_and_snapshots(undisturbed: Stage) -> None:
    losses = undisturbed.losses
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]
    assert [p.name for p in sorted(undisturbed.output.glob("step_*"))] == ["step_4", "step_8"]
    early, late = (
        load_file(undisturbed.output / name / "model.safetensors") for name in ("step_4", "step_8")
    )
    assert any(not torch.equal(early[name], late[name]) for name in late)
    assert all(torch.equal(late[name], tensor) for name, tensor in undisturbed.weights.items())
    assert not (undisturbed.output / RUN / CHECKPOINTS).exists()


def test_a_line_of_progress_is_the_mean_since_the_line_before() -> None:
    progress = SftProgress(spent=100.0)
    for losses in ((1.0, 3.0), (5.0,)):
        for loss in losses:
            progress.add(
                {"actor/logprob_mismatch_mean": loss, "actor/grad_norm": 0.5, "actor/lr": 1e-3},
                rows=4,
            )
        line = progress.line(7)
        assert f"loss {sum(losses) / len(losses):.4f}" in line
        assert "step 7  100 s" in line
        assert progress.rows == 0


@pytest.mark.slow_faults
def test_two_workers_do_what_one_does(folder: Path, digits_model: Path, undisturbed: Stage) -> None:
    two = ended(config(folder, digits_model, "two", workers=2))
    assert two.losses == pytest.approx(undisturbed.losses, rel=1e-3)
    for name, expected in undisturbed.weights.items():
        torch.testing.assert_close(two.weights[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow_faults
def test_a_stage_whose_worker_is_killed_ends_with_the_same_weights(
    folder: Path, digits_model: Path, undisturbed: Stage
) -> None:
    with started(config(folder, digits_model, "killed", checkpoint_every=1)) as stage:
        stage.has_checkpoint()
        stage.worker.kill()
        stage.ends(0)
    assert "continues after step" in stage.text
    assert all(
        torch.equal(stage.weights[name], tensor) for name, tensor in undisturbed.weights.items()
    )


@pytest.mark.slow_faults
def test_a_stopped_stage_goes_on_with_the_same_configuration_only(
    folder: Path, digits_model: Path, undisturbed: Stage
) -> None:
    settings = config(folder, digits_model, "stopped", checkpoint_every=1)
    with started(settings) as stage:
        stage.has_checkpoint()
        stage.process.send_signal(signal.SIGTERM)
        stage.ends(75)
    refused = ended({**settings, "batch_size": 4}, code=1)
    assert "another configuration" in refused.text
    again = ended(settings)
    assert "continues after step" in again.text
    assert all(
        torch.equal(again.weights[name], tensor) for name, tensor in undisturbed.weights.items()
    )


def nines(folder: Path, digits_model: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A stage on answers of nines alone, which makes other digits ever less likely; those are held
    out.
    """
    for file, rows in {
        "nines": [[9] * n for n in range(3, 19)],
        "ones": [[1] * n for n in range(3, 14)],
    }.items():
        lines = [json.dumps({"id": str(len(digits)), "digits": digits}) + "\n" for digits in rows]
        (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
    stage = config(folder, digits_model, name, save_every=2, best=True, steps=15, **changes)
    stage["data"] |= {"train": str(folder / "nines.jsonl"), "eval": str(folder / "ones.jsonl")}
    return stage


@pytest.fixture(scope="module")
def measured(folder: Path, digits_model: Path) -> Stage:
    return ended(nines(folder, digits_model, "measured"))


@pytest.mark.slow_faults
def test_a_stage_measures_held_out_rows_and_writes_the_best_weights(
    measured: Stage, folder: Path, digits_model: Path
) -> None:
    losses = measured.held_out
    assert list(losses) == [2, 4, 6, 8, 10, 12, 14, 15], "each save_every and the end"
    assert measured.text.count("held-out loss") == 8
    best = min(losses, key=losses.__getitem__)
    assert best < 10, "the weights at the end are others"
    kept = load_file(measured.output / f"step_{best}" / "model.safetensors")
    assert all(torch.equal(measured.weights[name], tensor) for name, tensor in kept.items())
    stage = SftConfig.model_validate(nines(folder, digits_model, "measured"))
    examples, rows = (
        Examples(stage),
        Dataset(str(stage.data.eval), stage.data.reader.build(), True, print),
    )
    items = [
        examples.item(task, random.Random(derive(0, "held out", n))) for n, task in enumerate(rows)
    ]
    for step in (2, 4, 6):
        written = ModelSettings(path=str(measured.output / f"step_{step}"))
        logprobs = FrozenScorer(written, stage.engine).logprobs([item.trajectory for item in items])
        assert losses[step] == pytest.approx(-float(np.concatenate(logprobs).mean()), abs=1e-4)


@pytest.mark.slow_faults
def test_a_killed_stage_of_two_workers_keeps_the_best_weights(
    folder: Path, digits_model: Path, measured: Stage
) -> None:
    with started(
        nines(folder, digits_model, "measured_by_two", workers=2, checkpoint_every=1)
    ) as stage:
        stage.has_checkpoint()
        eventually(
            lambda: 10 in stage.held_out or stage.process.poll() is not None,
            "an evaluation past the best",
            DEADLINE,
        )
        stage.worker.kill()
        stage.ends(0)
    assert "continues after step" in stage.text
    assert stage.held_out == pytest.approx(measured.held_out, rel=1e-3)
    for name, expected in measured.weights.items():
        torch.testing.assert_close(stage.weights[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("lacks", ["eval", "save_every"])
def test_the_best_weights_need_held_out_rows_and_snapshots(tmp_path: Path, lacks: str) -> None:
    settings = config(tmp_path, tmp_path, "out", best=True, save_every=2)
    settings["data"]["eval"] = "rows.jsonl"
    SftConfig.model_validate(settings)
    del (settings if lacks == "save_every" else settings["data"])[lacks]
    with pytest.raises(ValidationError, match=r"best needs data\.eval and save_every"):
        SftConfig.model_validate(settings)


def test_a_machine_with_other_memory_may_continue_a_stage(tmp_path: Path) -> None:
    given = SftConfig.model_validate(config(tmp_path, tmp_path, "out"))
    of = [
        _identity(
            given.model_copy(
                update={"engine": given.engine.model_copy(update={"micro_batch_tokens": tokens})}
            )
        )
        for tokens in (1024, 2048)
    ]
    assert of[0] == of[1]
    assert of[0]["engine"]["threads"] == 1
    assert _identity(given.model_copy(update={"batch_size": 4})) != of[0]


def test_a_tiny_model_is_made_as_configured(tmp_path: Path) -> None:
    rows = ROOT / "tests/data/grounding/train.jsonl"
    stage = SftConfig.model_validate(
        {
            **config(tmp_path, tmp_path / "tiny", "out"),
            "data": {
                "train": str(rows),
                "reader": {"use": "rayloop.recipes.arc_vision.data:GroundingRows"},
            },
            "answers": {"use": "rayloop.recipes.arc_vision.data:BoxAnswers"},
            "tiny": {"image_mean": [0.9, 0.8, 0.7], "sizes": {"layers": 2}},
        }
    )
    make_tiny(stage)
    made = {
        name: json.loads((tmp_path / "tiny" / name).read_text(encoding="utf-8"))
        for name in ("preprocessor_config.json", "config.json")
    }
    assert made["preprocessor_config.json"]["image_mean"] == [0.9, 0.8, 0.7]
    assert made["config.json"]["text_config"]["num_hidden_layers"] == 2


def test_a_tiny_model_that_was_half_written_is_made_again(
    tmp_path: Path, digits_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "models/tiny"
    stage = SftConfig.model_validate(
        {**config(folder, made, "out"), "tiny": {"vision": False, "sizes": {"layers": 1}}}
    )

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", refuse)
        with pytest.raises(OSError, match="No space left"):
            make_tiny(stage)
    assert list(made.parent.iterdir()) == []
    make_tiny(stage)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        file.name for file in made.iterdir()
    }
    assert list(made.parent.iterdir()) == [made]


def test_checkpoints_that_cannot_be_removed_do_not_fail_a_stage_that_wrote_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = SftConfig.model_validate(config(tmp_path, tmp_path / "model", "out"))
    checkpoints = tmp_path / "out" / RUN / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    monkeypatch.setattr("rayloop.cluster.stages.sft.session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(
        "rayloop.cluster.stages.sft.ray.remote",
        lambda **_: lambda work: SimpleNamespace(remote=work),
    )
    monkeypatch.setattr("rayloop.cluster.stages.sft._fit", lambda given: None)
    monkeypatch.setattr("rayloop.cluster.stages.sft._follow", lambda *_: None)
    with monkeypatch.context() as patch:
        keeps_folders(patch)
        assert sft(stage, None, None) == 0
    said = capsys.readouterr().out
    assert f"{checkpoints} could not be removed: " in said
    assert f"wrote {stage.output}" in said
    assert sft(stage, None, None) == 0
    assert not checkpoints.exists()
