"""A command looks for its model's files once, and reads the shapes of the weights once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayloop.cli import main
from rayloop.cluster.stages import evaluate, sft, train
from rayloop.core import model_files
from rayloop.core.failures import WorkerLost
from tests.support.runs import settings


def counted(patch: pytest.MonkeyPatch, function: Callable[..., Any]) -> list[str]:
    """The first argument of each later call of ``function``, by whatever module."""
    calls: list[str] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(str(arguments[0]))
        return function(*arguments, **options)

    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if value is function:
                patch.setattr(module, name, counting)
    return calls


def written(file: Path, config: dict[str, Any]) -> str:
    file.write_text(json.dumps(config), encoding="utf-8")
    return str(file)


def run_file(folder: Path, model: Path) -> str:
    return written(folder / "run.yaml", settings(folder, model))


def command_of(name: str, folder: Path, model: Path) -> list[str]:
    if name == "sft":
        stage = {
            "output": str(folder / "out"),
            "steps": 1,
            "model": {"path": str(model)},
            "data": settings(folder, model)["data"],
            "answers": {"use": "rayloop.recipes.digits.data:SortedAnswers"},
        }
        return ["sft", written(folder / "stage.yaml", stage)]
    command = [name, run_file(folder, model)]
    if name == "eval":
        command += ["--data", str(folder / "train.jsonl"), "--out", str(folder / "answers")]
    return command


def refuse(*_: Any, **__: Any) -> None:
    raise WorkerLost("the test starts no Ray")


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("train", [WorkerLost.exit_code]),
        ("eval", [WorkerLost.exit_code]),
        ("sft", [0]),
        # The machine of the test may have a fault.
        ("doctor", [0, 1]),
        ("estimate", [0]),
    ],
)
def test_a_command_resolves_its_model_once_and_reads_its_shape_once(
    name: str,
    codes: list[int],
    tmp_path: Path,
    text_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the command's process, until Ray starts; every actor looks on its own machine."""
    command = command_of(name, tmp_path, text_folder)
    # Until the first thing that needs Ray, or the trainer's processes.
    monkeypatch.setattr(train, "session", refuse)
    monkeypatch.setattr(evaluate, "session", refuse)
    monkeypatch.setattr(sft, "session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(sft, "_follow", lambda *_: None)
    here = SimpleNamespace(remote=lambda **_: lambda function: SimpleNamespace(remote=function))
    monkeypatch.setattr(sft, "ray", here)
    trainer = SimpleNamespace(fit=lambda: SimpleNamespace(return_value=None))
    monkeypatch.setattr(sft, "_torch_trainer", lambda config: trainer)
    for variable in ("RAY_CHDIR_TO_TRIAL_DIR", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"):
        monkeypatch.setenv(variable, "")
    resolved = counted(monkeypatch, model_files.resolve)
    headers = counted(monkeypatch, model_files.header)
    assert main(command) in codes
    assert resolved == [str(text_folder)]
    assert headers == [str(text_folder / "model.safetensors")]
