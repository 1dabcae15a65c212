"""macOS, Windows and notebooks: what needs nothing of Linux works, and what does says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rayloop.cli import main
from rayloop.core.failures import ConfigError
from rayloop.core.threads import complete
from rayloop.engines import machine
from tests.support.runs import ROOT

CONFIG = """
name: mine
steps: 1
model: {path: MODEL, min_pixels: 37632, max_pixels: 37632}
data: {train: rows.jsonl}
reward: {source: {use: "mine:reward"}}
"""
WITHOUT = """
import asyncio, concurrent.futures.process, multiprocessing, os, subprocess, sys, sysconfig, tempfile
import PIL.Image, httpx, numpy, psutil, pyarrow.parquet, transformers, yaml  # they read the platform

sysconfig.get_config_vars()

for module in {modules}:
    sys.modules[module] = None
for name in {names}:
    delattr(os, name)
sys.platform = {platform!r}
from rayloop.cli import main

codes = [main(words.split()) for words in sys.argv[1:]]
print("codes", *codes)
"""
LACKS = {
    "darwin": ((), ("sched_getaffinity", "sched_setaffinity", "pidfd_open", "memfd_create")),
    "win32": (
        ("fcntl", "resource", "pwd", "grp", "termios"),
        ("sched_getaffinity", "sched_setaffinity", "register_at_fork"),
    ),
}
COMMANDS = ("data validate mine.yaml", "train mine.yaml --print-config", "doctor --json")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(
        CONFIG.replace("MODEL", str(ROOT / "recipes/arc_vision/loose")), encoding="utf-8"
    )
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "How many?", "answer": "3"}\n', encoding="utf-8"
    )
    (tmp_path / "mine.py").write_text(
        "def reward(task, context):\n    return 1.0\n", encoding="utf-8"
    )
    return tmp_path


@pytest.mark.parametrize("platform", sorted(LACKS))
def test_what_needs_nothing_of_linux_works_without_it(platform: str, project: Path) -> None:
    modules, names = LACKS[platform]
    script = WITHOUT.format(modules=modules, names=names, platform=platform)
    done = subprocess.run(
        [sys.executable, "-c", script, *COMMANDS],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    *codes, doctor = done.stdout.splitlines()[-1].removeprefix("codes ").split()
    assert codes == ["0"] * 2, done.stderr
    assert doctor in ("0", "1"), "1: an error is found, which is an answer"
    assert "Traceback" not in done.stderr


def test_what_starts_actors_says_that_it_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.needs_linux("train")
    for platform in LACKS:
        monkeypatch.setattr(machine.sys, "platform", platform)
        with pytest.raises(ConfigError, match="train needs Linux \\(on Windows: WSL2\\)"):
            machine.needs_linux("train")


def test_all_cores_count_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.cores() == os.cpu_count()


def test_a_command_runs_in_a_cell(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The event loop of a notebook runs in the thread that calls."""
    monkeypatch.chdir(project)

    async def cell() -> int:
        return main(["doctor", "--json"])

    assert asyncio.run(cell()) in (0, 1)
    assert '"check": "python"' in capsys.readouterr().out


def test_a_coroutine_is_run_to_its_end_with_and_without_a_running_loop() -> None:
    async def answer() -> tuple[int, threading.Thread]:
        await asyncio.sleep(0)
        return 7, threading.current_thread()

    async def fails() -> None:
        raise KeyError("mine")

    async def cell() -> None:
        value, thread = complete(answer())
        assert (value, thread is threading.current_thread()) == (7, False)
        with pytest.raises(KeyError, match="mine"):
            complete(fails())

    assert complete(answer()) == (7, threading.current_thread())
    asyncio.run(cell())
