"""The commands of the pages are executed as a reader would: one after the other, from the root,
with runs made smaller.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.commands import ALL, BESIDE, EXECUTED, classed, quoted, words_of
from tests.support.runs import ROOT

pytestmark = [pytest.mark.commands, pytest.mark.timeout(400)]
LEFT_OUT = (".git", ".venv*", "runs", "build", "__pycache__", ".*_cache")
SIGNS = {
    "train": "runs/live/metrics.jsonl",
    "judge": "runs/judge.json",
    "policy": "runs/live/policy.json",
    "console": "",
}
"""Command that goes on -> the file that says that it serves; a console prints its address."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, with a configuration and a data file of the reader's own."""
    place = tmp_path_factory.mktemp("home") / "rayloop"
    shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copy(place / "recipes/digits/quickstart.yaml", place / "mine.yaml")
    shutil.copy(next((place / "recipes/arpo/tasks").rglob("*.jsonl")), place / "train.jsonl")
    return place


def line(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "rayloop", *words]


def environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


def execute(checkout: Path, words: list[str]) -> None:
    """Raises AssertionError, with what the command printed, unless it exits with 0."""
    done = subprocess.run(
        line(words),
        cwd=checkout,
        env=environment(checkout),
        input="quit\n",
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize(("command", "more"), EXECUTED, ids=[command for command, _ in EXECUTED])
def test_the_command_works(checkout: Path, command: str, more: str) -> None:
    execute(checkout, words_of(command, more))


@pytest.mark.parametrize(
    ("lives", "others"), BESIDE.items(), ids=[command for command, _ in BESIDE]
)
def test_commands_beside_one_that_goes_on(
    checkout: Path, lives: tuple[str, str], others: tuple[tuple[str, str], ...]
) -> None:
    started = [began(checkout, words_of(*lives))]
    try:
        for command, more in others:
            words = words_of(command, more)
            if "URL" in words:
                words[words.index("URL")] = json.loads(
                    (checkout / "runs/judge.json").read_text(encoding="utf-8")
                )["url"]
            if command.startswith("policy serve"):
                started.append(began(checkout, words))
            else:
                execute(checkout, words)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(100)


def began(checkout: Path, words: list[str]) -> subprocess.Popen[str]:
    """The command, when it serves."""
    log = checkout / f"{words[0]}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            line(words),
            cwd=checkout,
            env=environment(checkout),
            stdout=said,
            stderr=said,
            text=True,
        )
    deadline, sign = time.monotonic() + 150, SIGNS[words[0]]
    while not (
        (checkout / sign).exists()
        if sign
        else "console: http://" in log.read_text(encoding="utf-8")
    ):
        assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
        assert time.monotonic() < deadline, log.read_text(encoding="utf-8")[-3000:]
        time.sleep(0.2)
    return process


def test_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    places = [place for [place] in map(classed, quoted())]
    needs = Counter(place for place in places if place != "executed" and not place.endswith(".py"))
    executed, elsewhere = (
        places.count("executed"),
        len(places) - places.count("executed") - needs.total(),
    )
    with capsys.disabled():
        print(
            f"\ncommands of the pages: {executed} of {len(places)} are executed here, {elsewhere}"
            " by other tests;",
            end=" ",
        )
        print(
            "the rest need " + ", ".join(f"{need} ({count})" for need, count in needs.most_common())
        )
    assert executed == len(ALL)
