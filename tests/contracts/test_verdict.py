"""What follows from each failure of an episode: verdicts.yaml, against the pure function.

Each row is the story of a group's episodes, call by call, and the end of the group. The history is
the real one; nothing else of a run is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from rayloop.core.failures import Cause, Failure, Scope
from rayloop.core.types import RolloutRequest, Sampling, Task, TrajectoryId
from rayloop.rollout.failed_episodes import FailureHistory
from rayloop.rollout.verdict import (
    Call,
    Context,
    EpisodeResult,
    LostCall,
    Next,
    Record,
    Verdict,
    verdict,
)
from rayloop.run.sections import EnvironmentSettings

TASK = "train-3"
FAILURES = {
    "raised": Failure(Cause.RAISED, Scope.EPISODE, retryable=True, why="no space left"),
    "bug": Failure(Cause.BUG, Scope.EPISODE, retryable=False, why="returned a str"),
    "another bug": Failure(Cause.BUG, Scope.EPISODE, retryable=False, why="returned None"),
    "hung": Failure(Cause.HUNG, Scope.PROCESS, retryable=True, why="no answer"),
    "hung, contained": Failure(Cause.HUNG, Scope.EPISODE, retryable=True, why="no answer"),
    "bad data": Failure(Cause.BAD_DATA, Scope.EPISODE, retryable=True, why="corrupt", path="x.png"),
    "bad data in engine": Failure(
        Cause.BAD_DATA, Scope.ENGINE, retryable=True, why="corrupt", path="x.png"
    ),
    "over long": Failure(Cause.OVER_LONG, Scope.ENGINE, retryable=False, why="9000 tokens"),
    "diverged": Failure(Cause.DIVERGED, Scope.ENGINE, retryable=False, why="NaN in the logits"),
    "of engine": Failure(Cause.RAISED, Scope.ENGINE, retryable=True, why="KeyError: 'turn'"),
}
LOSSES = {
    "died": LostCall("it died: exit 1\nlog", "it died: exit 1", False, False, False),
    "silent": LostCall("no answer in 200 s", "no answer in 200 s", False, True, False),
    "spent": LostCall("8 calls hang\nlog", "8 calls hang", True, True, False),
    "ended by another call": LostCall("it was killed", "it was killed", False, False, True),
}
WELL = {True: "well", False: "ill", None: "unknown"}
TABLE: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("verdicts.yaml").read_text(encoding="utf-8")
)


class Seat(NamedTuple):
    worker: int
    slot: int
    node: str


class Staff:
    def __init__(self, nodes: list[str]) -> None:
        self.size, self.homes = len(nodes), set(nodes)


class Story:
    """``nodes``, ``engine_nodes``: the node of each actor and engine; ``well``: the number of
    episodes of other tasks that go well beside the group; ``failing``: by worker, the tasks that
    failed on it before; ``limit``: ``environment.attempts``; ``served``: whether episodes went well
    on the actors earlier; ``groups_failed``: the groups before this one in which the task failed;
    ``hangs``: why no other episode of the group is played, before its end.
    """

    def __init__(
        self,
        calls: list[dict[str, Any]],
        end: str | None = None,
        nodes: list[str] = ["a", "a"],  # noqa: B006
        engine_nodes: list[str] = ["a", "a"],  # noqa: B006
        limit: int = 3,
        well: int = 1,
        failing: dict[int, list[str]] = {},  # noqa: B006
        served: bool | None = None,
        groups_failed: int = 0,
        hangs: str | None = None,
    ) -> None:
        self.calls, self.end, self.hangs, self.limit = calls, end, hangs, limit
        self.nodes, self.engine_nodes = nodes, engine_nodes
        self.history = FailureHistory(EnvironmentSettings(actors=len(nodes), attempts=limit))
        self.history.groups_failed[TASK] = groups_failed
        self.records: dict[int, Record] = {}
        for worker in range(1, 8):
            self.history.begins(1, worker)
            self.history.processes[worker].failing.update(failing.get(worker, []))
            self.history.processes[worker].served = well > 0 if served is None else served
        self.history.successes += well
        self.failed = False

    def seat(self, worker: int, nodes: list[str]) -> Seat:
        """Workers count from 1, and take turns in the slots."""
        slot = (worker - 1) % len(nodes)
        return Seat(worker, slot, nodes[slot])

    def play(self, step: dict[str, Any], index: int) -> Verdict:
        """One call: ``results`` by episode, or a ``loss`` of ``episodes``; ``worker``, ``engine``:
        the workers.
        """
        results: dict[int, str] = step.get("results", {})
        lost = LOSSES.get(step.get("loss", ""))
        numbers = list(step.get("episodes", results))
        environment = self.seat(step.get("worker", index + 1), self.nodes)
        engine = self.seat(step.get("engine", index + 1), self.engine_nodes)
        task = Task(TASK, ())
        requests = [
            RolloutRequest(task, TrajectoryId(1, number), 0, 0, Sampling()) for number in numbers
        ]
        played: Any = ("summary", "payload")
        outcomes: list[Failure | EpisodeResult] = (
            [lost.failure] * len(numbers)
            if lost is not None
            else [FAILURES.get(results[number], played) for number in numbers]
        )
        call = Call(requests, environment, engine, outcomes, lost)
        before = [self.records.get(number, Record()) for number in numbers]
        context = Context(
            self.limit,
            before,
            Staff(self.nodes),
            Staff(self.engine_nodes),
            self.history.processes,
            self.history.successes,
        )
        result = verdict(call, context)
        assert verdict(call, context) == result, "nothing was changed by the first look"
        for settle in result.episodes:
            self.records[numbers[settle.episode]] = settle.record
            if settle.next is Next.PLAYED:
                self.history.succeeded(environment.worker)
            for seat, failure in settle.charges:
                place = seat.node if len(set(self.nodes)) > 1 else seat.slot
                self.history.failed(1, TASK, seat.worker, place, failure)
            self.failed |= settle.next is Next.GIVEN_UP
        return result._replace(
            episodes=[
                settle._replace(episode=numbers[settle.episode]) for settle in result.episodes
            ]
        )


def said(result: Verdict) -> list[str]:
    """A verdict as the rows of the table have it, in the order in which it is carried out."""
    lines = [f"actor {WELL[result.actor_worked]}"]
    for worker, why, charged, spares_others in result.replacements:
        cost = "charged" if charged else "free"
        lines.append(f"replace {worker}, {cost}{', spares others' * spares_others}: {why}")
    for settle in result.episodes:
        record = settle.record
        line = f"{settle.episode} {settle.next}"
        if settle.next in (Next.AGAIN, Next.GIVEN_UP):
            line += f" {record.charged}/{record.attempts}"
        if settle.next is Next.AGAIN:
            line += f" off {sorted(record.environments)}"
            line += f" engines {sorted(record.engines)}" * bool(record.engines)
        line += f", engine {WELL[settle.engine_worked]}" * (settle.engine_worked is not None)
        line += "".join(f", counts on {seat.worker}" for seat, _ in settle.charges)
        lines.append(line)
    return lines


@pytest.mark.parametrize("name", TABLE)
def test_a_failure_has_one_verdict(name: str) -> None:
    story = Story(**TABLE[name])
    for index, step in enumerate(story.calls):
        assert said(story.play(step, index)) == step["then"]
    if story.hangs is not None:
        assert story.history.hangs(1) == story.hangs
    if story.end is not None:
        assert story.history.ended(1, TASK, story.failed) == story.end
