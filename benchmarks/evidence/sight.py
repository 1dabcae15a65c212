"""Whether the alarm ``alarms.sight`` notices a policy that becomes blind, and what it costs.

    python -m benchmarks.evidence sight     continues benchmarks/evidence/sight.json, and prints it

Trains the policy of examples/grpo_in_one_file.py with the trainer of a run in one process: steps of
an eighth of the README's quickstart, of which the alarm scores as many turns as of a whole one.
After GOOD_STEPS to GOOD_STEPS + 4 steps every picture is grey, until the alarm, at most BLIND_STEPS
steps. ``good``, ``blind``: ``actor/sight`` of the steps that have it; ``screens``: the values that
the alarm saw in good steps; ``false_alarms``: in good steps; ``noticed``: blind steps until the
alarm. ``cost``: of a whole step of the quickstart, the CPU seconds without the check, and what it
adds to one of five, with and without by turns. ``resampled``: false alarms of so many runs of the
quickstart's length with screens drawn from these runs.
"""

from __future__ import annotations

import io
import json
import math
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from benchmarks.evidence.runs import write
from examples import grpo_in_one_file as one_file
from rayloop.core.groups import Group
from rayloop.core.protocols import TrainItem
from rayloop.core.types import ImageSource, Task, TrajectoryId, Version
from rayloop.data.images import decode
from rayloop.engines.models import hf_state
from rayloop.engines.training.fsdp import FsdpEngine
from rayloop.engines.training.sight import CHECK_STRIDE_STEPS
from rayloop.grpo.alarms import Alarms, AlarmSettings
from rayloop.grpo.sight import Sight, of_screens, sight_metrics

RESULT = Path(__file__).with_suffix(".json")
SEED_COUNT = 10
QUICKSTART_SIZE = (16, 16)
"""Groups and their size."""
SMALL_SIZE = (8, 4)
GOOD_STEPS, BLIND_STEPS = 11, 5
LONG_RUN_STEPS, RESAMPLED_RUNS = 60, 1000
SHARE = AlarmSettings().sight
SMALL_SHARE = SHARE * math.prod(QUICKSTART_SIZE) / math.prod(SMALL_SIZE)
GREY_RGB = (128, 128, 128)
ALTERNATION_COUNT = 10


def greyed(task: Task) -> Task:
    """The task with grey pictures of the same sizes."""
    messages = []
    for message in task.messages:
        parts: list[str | ImageSource] = []
        for part in message.parts:
            if isinstance(part, ImageSource):
                data = Path(part.path).read_bytes() if part.path else part.data
                file = io.BytesIO()
                Image.new("RGB", decode(data or b"").size, GREY_RGB).save(file, "PNG")
                part = ImageSource(data=file.getvalue())
            parts.append(part)
        messages.append(replace(message, parts=tuple(parts)))
    return replace(task, messages=tuple(messages))


class Rows:
    """The rows of a dataset; grey ones once it is ``blind``."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.blind = False

    def __getitem__(self, index: int) -> Task:
        return greyed(self.rows[index]) if self.blind else self.rows[index]


class Watched(one_file.OneFile):
    """A run with the trainer of a cluster, and its alarm."""

    def __init__(self, seed: int, meeting: str) -> None:
        super().__init__(seed)
        # Groups of equal rewards stay: of grey pictures there may be no others.
        self.filters = ()
        self.dataset: Any = Rows(self.dataset)
        self.engine = FsdpEngine(
            one_file.MODEL,
            one_file.ENGINE,
            one_file.OPTIMIZER,
            one_file.LOSS,
            rank=0,
            world_size=1,
            init_method=meeting,
            seed=seed,
        )
        self.emitted: list[Any] = []
        self.alarms = Alarms(AlarmSettings(), 1e-3, "IoUReward", self.emitted.append)
        self.changes: dict[TrajectoryId, Any] = {}
        self.items: list[TrainItem] = []

    def train(self, groups: Sequence[Group]) -> list[float]:
        """One optimizer update by the trainer of a run, which also scores turns again."""
        self.items = [
            TrainItem(self.trajectories[member.summary.id], member.advantage or 0.0)
            for group in groups
            for member in group.kept
        ]
        report = self.engine.train([self.items], SMALL_SHARE)
        self.changes = dict(self.engine.sight)
        self.trajectories.clear()
        own = hf_state(self.policy)
        for name, weights in self.engine.export(Version(0, self.step)).items():
            own[name].copy_(weights)
        return [report["actor/loss"]]

    def looked(self) -> tuple[float | None, bool]:
        """The mean change of the step's turns, and whether the alarm was emitted now."""
        before = len(self.emitted)
        self.alarms.looked(of_screens(self.changes))
        change = sight_metrics(self.changes).get("actor/sight")
        return None if change is None else round(change, 3), len(self.emitted) > before

    def seconds(self, share: float) -> float:
        """CPU seconds of an update on the last step, one of five that have the check."""
        self.engine._optimizer.updates = 0
        began = time.process_time()
        self.engine.train([self.items], share)
        return time.process_time() - began


def run(seed: int) -> dict[str, Any]:
    """One run: good steps, and then blind ones."""
    # The check of every fifth step comes up to four steps after the pictures have changed.
    good_steps = GOOD_STEPS + seed % CHECK_STRIDE_STEPS
    good: list[float] = []
    blind: list[float] = []
    screens: list[float] = []
    false_alarms, noticed = 0, None
    one_file.GROUPS, one_file.GROUP_SIZE = SMALL_SIZE
    with tempfile.TemporaryDirectory() as folder:
        one = Watched(seed, f"file://{folder}/meet")
        for number, _ in enumerate(one.steps(), 1):
            change, alarmed = one.looked()
            changes = [] if change is None else [change]
            if number <= good_steps:
                good += changes
                screens += [round(value, 3) for value in of_screens(one.changes)]
                false_alarms += alarmed
            else:
                blind += changes
                noticed = number - good_steps if alarmed else None
            one.dataset.blind = number >= good_steps
            if noticed is not None or number == good_steps + BLIND_STEPS:
                break
        one.engine.close()
    return {
        "good": good,
        "blind": blind,
        "screens": screens,
        "false_alarms": false_alarms,
        "noticed": noticed,
    }


def cost() -> dict[str, float]:
    """CPU seconds of a step of the quickstart, and what the check adds to one step of five."""
    one_file.GROUPS, one_file.GROUP_SIZE = QUICKSTART_SIZE
    with tempfile.TemporaryDirectory() as folder:
        one = Watched(0, f"file://{folder}/meet")
        next(one.steps())
        began = time.process_time()
        one.collect()
        generating = time.process_time() - began
        pairs = [(one.seconds(0.0), one.seconds(SHARE)) for _ in range(ALTERNATION_COUNT)]
        turns = len(one.engine.sight)
        one.engine.close()
    added = median(checked - plain for plain, checked in pairs)
    step = generating + median(plain for plain, _ in pairs)
    return {
        "step": round(step, 2),
        "added": round(added, 3),
        "turns": turns,
        "percent": round(100 * added / CHECK_STRIDE_STEPS / step, 2),
    }


def resampled(runs: dict[str, Any]) -> int:
    """How many of RESAMPLED_RUNS runs of a policy that looks raise an alarm."""
    chance = random.Random(0)
    checks = math.ceil(LONG_RUN_STEPS / CHECK_STRIDE_STEPS)
    values = [value for one in runs.values() for value in one["screens"]]
    screens = round(SHARE * CHECK_STRIDE_STEPS * math.prod(QUICKSTART_SIZE) / 2)
    alarmed = 0
    for _ in range(RESAMPLED_RUNS):
        watch = Sight()
        alarms = [watch.step(chance.choices(values, k=screens)) for _ in range(checks)]
        alarmed += any(limit.warns(value) for each in alarms for value, limit, _ in each.values())
    return alarmed


def main() -> None:
    """Run what the file lacks, and print it."""
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    runs = found.setdefault("runs", {})
    if "cost" not in found:
        found["cost"] = cost()
    print("cost", json.dumps(found["cost"]), flush=True)
    for seed in map(str, range(SEED_COUNT)):
        if seed not in runs:
            runs[seed] = run(int(seed))
            found["resampled"] = [resampled(runs), RESAMPLED_RUNS]
            write(RESULT, found, levels=2)
        print(seed, json.dumps(runs[seed]), flush=True)
    print("{} false alarms in {} resampled runs".format(*found["resampled"]))
