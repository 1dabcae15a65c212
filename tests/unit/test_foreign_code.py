"""Which commands import what a stranger's configuration names with ``use:``. docs/security.md has
the list of those that do.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from rayloop.cli import COMMANDS, main
from rayloop.replay import bundle
from rayloop.run.folder import RunFolder
from tests.support.runs import ROOT

RUNS = {
    "train": ["train", "{config}"],
    "try": ["try", "{config}"],
    "eval": ["eval", "{config}"],
    "doctor": ["doctor", "{config}"],
    "estimate": ["estimate", "{config}"],
    "data validate": ["data", "validate", "{config}"],
    "env check": ["env", "check", "{config}"],
    "env play": ["env", "play", "{config}"],
    "submit": ["submit", "{config}", "--address", "http://127.0.0.1:9", "--insecure"],
    "sft": ["sft", "{sft}"],
    "report": ["report", "{run}"],
    "replay": ["replay", "{run}"],
    "bundle": ["bundle", "{run}", "--step", "1", "--out", "{out}"],
    "console": ["console", "{run}"],
}
"""Command -> how it imports; docs/security.md names each of them."""
ONLY_READS = {
    "train --print-config": ["train", "{config}", "--print-config"],
    "status": ["status", "{run}"],
    "compare": ["compare", "{run}", "{run}"],
    "watch": ["watch", "{run}"],
    "logs": ["logs", "{run}"],
    "stacks": ["stacks", "{run}"],
    "stop": ["stop", "{run}"],
    "policy": ["policy", "serve", "--run", "{run}"],
    "export": ["export", "{run}", "{out}"],
    "replay of a bundle": ["replay", "{bundle}"],
    "replay of a bundle with another value": ["replay", "{bundle}", "reward.on_error=0"],
}
OF_OTHERS = {"judge", "node", "parity", "slurm", "score"}
"""Commands that take no configuration of a run, and no run."""
FOREIGN = "foreign_code_of_a_stranger"


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A run, its configuration and a supervised stage, which name a module that leaves a mark and
    refuses.
    """
    (tmp_path / f"{FOREIGN}.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'a').close()\nraise RuntimeError('imported')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = yaml.safe_load((ROOT / "recipes/digits/quickstart.yaml").read_text(encoding="utf-8"))
    foreign = {"use": f"{FOREIGN}:Thing"}
    config |= {
        "name": "run",
        "output": str(tmp_path),
        "report": {"boxes": foreign},
        "reward": {"source": foreign},
    }
    config["data"] = {"train": str(tmp_path / "rows.jsonl"), "reader": foreign, "order": foreign}
    config["environment"] = {
        "episode": {"environment": foreign},
        "kinds": {"own": foreign},
        "history": foreign,
    }
    config["loggers"] = [foreign]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    sft = yaml.safe_load((ROOT / "recipes/digits/warm.yaml").read_text(encoding="utf-8"))
    sft |= {
        "output": str(tmp_path / "model"),
        "answers": foreign,
        "data": config["data"] | {"order": None},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(sft), encoding="utf-8")
    run = RunFolder(tmp_path, "run")
    run.path.mkdir()
    run.config.write_text(yaml.safe_dump(config), encoding="utf-8")
    _keep_step(run, foreign)
    run.metrics.append({"step": 1, "reward/mean": 0.5})
    run.close()
    bundle.write(run, 1, tmp_path / "step.bundle")
    return {
        "config": str(tmp_path / "config.yaml"),
        "sft": str(tmp_path / "sft.yaml"),
        "run": str(run.path),
        "out": str(tmp_path / "out"),
        "bundle": str(tmp_path / "step.bundle"),
        "mark": str(tmp_path / "mark"),
    }


def _keep_step(run: RunFolder, foreign: dict[str, str]) -> None:
    """Step 1 without groups, of a run with a stranger's advantage and reward."""
    run.rollouts.path.mkdir()
    config = {
        "seed": 0,
        "algorithm": {"advantage": foreign},
        "reward": {"source": foreign},
        "policy": {},
    }
    step = {
        "schema": 1,
        "step": 1,
        "version": [1, 0],
        "config": config,
        **{name: [] for name in ("groups", "texts", "trained", "ranks")},
    }
    run.rollouts.write_step(1, step)


def imports(words: list[str], names: dict[str, str]) -> tuple[int | str | None, bool]:
    """The exit code of a command, and whether it imported what the configuration names."""
    sys.modules.pop(FOREIGN, None)
    try:
        code: int | str | None = main([word.format(**names) for word in words])
    except SystemExit as end:
        code = end.code
    return code, Path(names["mark"]).exists()


@pytest.mark.parametrize("command", ONLY_READS)
def test_a_command_that_only_reads_imports_nothing(
    command: str, names: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, imported = imports(ONLY_READS[command], names)
    assert not imported
    if command.startswith("train"):
        assert code == 0
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["reward"]["source"] == {"use": f"{FOREIGN}:Thing", "with": {}}


@pytest.mark.parametrize("command", RUNS)
def test_a_command_that_imports_is_on_the_list(command: str, names: dict[str, str]) -> None:
    code, imported = imports(RUNS[command], names)
    assert (code != 0, imported) == (True, True)
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    [listed] = re.findall(
        r"^- `use: module:Class` in a configuration: (.*(?:\n  .*)*)", page, re.MULTILINE
    )
    assert f"`{command}" in listed, listed


def test_the_walk_knows_every_command() -> None:
    walked = {command.split()[0] for command in (*RUNS, *ONLY_READS)}
    assert set(COMMANDS) == walked | OF_OTHERS


def test_a_setting_of_what_is_shipped_is_still_checked_when_it_is_printed(
    names: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(Path(names["config"]).read_text(encoding="utf-8"))
    config["data"]["reader"] = {"use": "rayloop.data.dataset:ChatRows", "with": {"imgs": "x"}}
    Path(names["config"]).write_text(yaml.safe_dump(config), encoding="utf-8")
    assert imports(ONLY_READS["train --print-config"], names) == (2, False)
    assert "imgs" in capsys.readouterr().err
