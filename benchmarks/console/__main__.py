"""``python -m benchmarks.console``: the console of a run with many episodes: index, pages,
searches, and what an open page costs.

The run is made up: records of the product's own writers, with texts of random words. The console is
its command in a process of its own. Prints one JSON line; times are seconds, each the median of
``--repeats``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.measure import machine
from rayloop.run.folder import RunFolder
from rayloop.run.records.rollouts import RolloutRecord, RolloutTurn

GROUPS, SIZE, TURNS, WORDS = 10, 8, 4, 30
"""Groups of a step, episodes of a group, turns of an episode, words of a text."""
PAGES = {
    "overview": "/",
    "rollouts": "/rollouts",
    "episodes": "/rollouts?view=episodes&order=highest",
    "step": "/step/2",
    "episode": "/step/2/group/2/sample/3",
    "search_rare": "/rollouts?text=needle",
    "search_common": "/rollouts?text=ab",
    "search_two": "/rollouts?text=ab+ba&view=episodes",
    "filters": "/rollouts?source=s3&status=kept&least=0.5&order=lowest",
}
STEP, LOOKS, CHANGES = 10.0, 20, 4
"""Seconds of the step of which an open page takes a share; its looks in that time, and how many of
them find something new.
"""


def main() -> int:
    """Make the run, serve it, measure it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console", description=__doc__)
    parser.add_argument("--episodes", type=int, default=50_000, help="recorded episodes of the run")
    parser.add_argument("--repeats", type=int, default=9, help="requests of each page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, RunFolder(root, "made-up").acquired() as run:
        steps = made(run, arguments.episodes)
        size = sum(file.stat().st_size for file in run.rollouts.files().values())
        with served(run.path) as (client, process):
            first = timed(lambda: client.get("/"))
            index = until_indexed(client, process)
            found = {
                name: page(client, address, arguments.repeats) for name, address in PAGES.items()
            }
            cost = open_page(client, process, run, steps, arguments.repeats)
        megabytes = round((run.path / "index.sqlite").stat().st_size / 1e6, 1)
    result = {
        "episodes": steps * GROUPS * SIZE,
        "steps": steps,
        "rollouts_mb": round(size / 1e6, 1),
        "index_mb": megabytes,
    }
    print(
        json.dumps(
            {
                **result,
                "first_answer_s": first,
                "index": index,
                "pages": found,
                "open_page": cost,
                "machine": machine(),
            }
        )
    )
    return 0


def made(run: RunFolder, episodes: int) -> int:
    """Write that many episodes; returns the number of steps."""
    draw, letters = random.Random(1), "abcdefgh"
    vocabulary = ["".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(5000)]
    steps = max(1, episodes // (GROUPS * SIZE))
    run.write_config(f"steps: {steps + 100}\n")
    for step in range(1, steps + 1):
        records = [
            episode(draw, vocabulary, step, group, sample)
            for group in range(1, GROUPS + 1)
            for sample in range(SIZE)
        ]
        run.rollouts.write(step, records, {})
        trained(run, step)
    return steps


def trained(run: RunFolder, step: int) -> None:
    """What the driver records when a step has been trained."""
    run.events.append(
        {
            "event": "trained",
            "step": step,
            "groups": {str(n): list(range(SIZE)) for n in range(1, GROUPS + 1)},
        }
    )
    values = {f"metric/{number}": step / (number + 1) for number in range(40)}
    shares = {
        "timing_s/step": 10.0,
        "timing_s/gen": 6.0,
        "timing_s/update_actor": 4.0,
        "actor/entropy": 1 / step,
    }
    run.metrics.append(
        {
            "step": step,
            "reward/mean": step / 1000,
            **shares,
            **values,
            "ledger/trained": 80.0 * step,
        }
    )


def episode(
    draw: random.Random, vocabulary: list[str], step: int, group: int, sample: int
) -> RolloutRecord:
    """Of several turns; one in a thousand has the word ``needle``."""
    texts = [" ".join(draw.choices(vocabulary, k=WORDS)) for _ in range(2 * TURNS)]
    texts[0] += " needle" if draw.random() < 0.001 else ""
    turns = tuple(
        RolloutTurn("user" if k % 2 else "assistant", text, not k % 2)
        for k, text in enumerate(texts)
    )
    reward = draw.random()
    return RolloutRecord(
        group,
        sample,
        0,
        f"task-{step}-{group}",
        f"s{group % 5}",
        texts[-1] * 2,
        (),
        turns,
        "done",
        reward,
        {"reward": reward},
        advantage=reward - 0.5,
        status="kept" if reward > 0.1 else "filtered: all_wrong",
    )


@contextmanager
def served(run: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """The command, and a client that has the token."""
    command = [sys.executable, "-m", "rayloop", "console", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, _, file = (
                process.stdout.readline()
                .removeprefix("console: ")
                .strip()
                .partition("/ (its ?token= is in ")
            )
            token = Path(file.removesuffix(")")).read_text(encoding="utf-8")
            with httpx.Client(
                base_url=address, headers={"Authorization": f"Bearer {token}"}, timeout=120
            ) as client:
                yield client, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(20)


def timed(call: Callable[[], httpx.Response]) -> float:
    """Seconds of a request."""
    began = time.perf_counter()
    call().raise_for_status()
    return round(time.perf_counter() - began, 4)


def cpu(process: psutil.Process) -> float:
    """CPU seconds that the process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def until_indexed(client: httpx.Client, process: psutil.Process) -> dict[str, float]:
    """Seconds until every file is read."""
    began, used = time.perf_counter(), cpu(process)
    while "files are read" in client.get("/rollouts").text:
        time.sleep(0.5)
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_s": round(cpu(process) - used, 2),
    }


def page(client: httpx.Client, address: str, repeats: int) -> dict[str, Any]:
    """Seconds of a page, and its bytes."""
    seconds = [timed(lambda: client.get(address)) for _ in range(repeats)]
    return {
        "seconds": statistics.median(seconds),
        "slowest": max(seconds),
        "bytes": len(client.get(address).content),
    }


def open_page(
    client: httpx.Client, process: psutil.Process, run: RunFolder, steps: int, repeats: int
) -> dict[str, float]:
    """CPU seconds of a look that finds nothing, and of one that finds a new step; the share of a
    core that an open page takes.
    """
    looks, new = list[float](), list[float]()
    for step in range(steps + 1, steps + 1 + repeats):
        stamp = client.get("/").headers["ETag"]
        used = cpu(process)
        for _ in range(10):
            client.get("/", headers={"If-None-Match": stamp})
        looks.append((cpu(process) - used) / 10)
        trained(run, step)
        used = cpu(process)
        client.get("/", headers={"If-None-Match": stamp}).raise_for_status()
        new.append(cpu(process) - used)
    look, step_cost = statistics.mean(looks), statistics.mean(new)
    share = (look * LOOKS + step_cost * CHANGES) / STEP
    return {
        "look_cpu_s": round(look, 5),
        "new_step_cpu_s": round(step_cost, 4),
        "step_s": STEP,
        "share_of_a_core": round(share, 5),
    }


if __name__ == "__main__":
    sys.exit(main())
