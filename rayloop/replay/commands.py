"""``replay`` and ``bundle``: a recorded step computed again, here or by somebody else.

They need neither Ray, nor the model, nor the environments.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rayloop.core.failures import ConfigError
from rayloop.core.threads import complete
from rayloop.replay import bundle, compare
from rayloop.replay.bundle import plain_of
from rayloop.replay.compare import Count
from rayloop.replay.decisions import decide, recorded
from rayloop.replay.losses import compute, shares, threads_of, token_record
from rayloop.replay.rewards import Rewards, rewards
from rayloop.replay.settings import asks_judge, foreign, recorded_config, with_judge
from rayloop.replay.what_if import LISTED_TOKENS, Change, WhatIf, what_if
from rayloop.rollout.step_record import RecordedStep, step_from_plain
from rayloop.run.folder import RunFolder


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``replay``."""
    parser.add_argument(
        "record", type=Path, metavar="RUN_OR_FILE", help="folder of a run, or a bundle's file"
    )
    parser.add_argument("--step", type=int, metavar="N", help="one step (default: all kept ones)")
    parser.add_argument(
        "--judge", metavar="URL", help="ask this judge in place of the verdicts on record"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each step")
    parser.add_argument(
        "--trust", action="store_true", help="run components of a bundle that are not rayloop's"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="what if: other values, for example algorithm.advantage=rloo reward.on_error=0",
    )
    parser.set_defaults(run=run_replay)


def add_bundle(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bundle``."""
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it (RUN-step-N.bundle)"
    )
    parser.set_defaults(run=run_bundle)


def run_bundle(arguments: argparse.Namespace) -> int:
    """Write a bundle, and replay it once. Returns as ``run_replay``; raises ConfigError."""
    folder = RunFolder.begun(arguments.run_folder)
    out = arguments.out or Path(f"{folder.path.name}-step-{arguments.step}.bundle")
    digest = bundle.write(folder, arguments.step, out)
    code = _report(_replayed(bundle.read(out), trusted=True), out.name, as_json=False)
    print(f"{out}: {out.stat().st_size:,} bytes, SHA-256 {digest}")
    return code


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay steps. Returns 0, or 1 when something differs from the record; raises ConfigError."""
    is_run = arguments.record.is_dir()
    trusted = is_run or arguments.trust
    code = 0
    for step in _steps(arguments.record, arguments.step):
        if arguments.overrides or arguments.judge:
            changes = _changed(step, arguments.overrides, arguments.judge, trusted)
            _show(changes, as_json=arguments.json)
        else:
            result = _replayed(step, trusted)
            code |= _report(result, arguments.record.name, as_json=arguments.json)
    return code


def _steps(record: Path, number: int | None) -> Iterator[RecordedStep]:
    """The steps of a run's folder or a bundle, all or the one asked for. Raises ConfigError."""
    if record.is_dir():
        folder = RunFolder.begun(record)
        numbers = folder.rollouts.replayable() if number is None else [number]
        # Without a kept step, the first one is refused with the reason.
        for one in numbers or [1]:
            yield _of_run(folder, one)
        return
    step = bundle.read(record)
    if number not in (None, step.step):
        raise ConfigError(f"{record} has step {step.step}, not {number}")
    yield step


def _of_run(folder: RunFolder, number: int) -> RecordedStep:
    return step_from_plain(plain_of(folder, number), f"step {number} of {folder.path.name}")


@dataclass(frozen=True)
class Replayed:
    """A step that was computed again: counts by stage, and what stayed as recorded."""

    step: RecordedStep
    rewards: Rewards
    counts: Mapping[str, Count]
    seconds: float

    @property
    def equal(self) -> bool:
        """Whether nothing differs from the record."""
        return all(count.all_equal for count in self.counts.values())


def _refuse_foreign(config: Any, trusted: bool) -> None:
    """Raise ConfigError for an algorithm of a bundle that is not rayloop's."""
    algorithm = {"algorithm": config["algorithm"], "policy": config["policy"]}
    names = [] if trusted else list(foreign(algorithm))
    if names:
        raise ConfigError(
            f"the bundle's algorithm has {names[0]}, which is not a part of rayloop. Read that code"
            " first; --trust runs it"
        )


def _replayed(step: RecordedStep, trusted: bool) -> Replayed:
    """The step computed again, under the settings on record."""
    began = time.monotonic()
    _refuse_foreign(step.config, trusted)
    config = recorded_config(step.config)
    outcomes = complete(rewards(step, config.reward, trusted=trusted))
    now = decide(step, config.algorithm, outcomes.outcomes)
    counts = compare.decisions(step, outcomes, now)
    # The record's own groups: a difference above must not hide whether the losses agree.
    trained = shares(recorded(step).trained, config, step)
    record = token_record(trained, step)
    with threads_of(step):
        computed = compute(trained, config.policy.loss, _state(step), record, same_plan=True)
    counts |= compare.losses(step, record, computed)
    return Replayed(step, outcomes, counts, time.monotonic() - began)


def _state(step: RecordedStep) -> Sequence[float] | None:
    """The coefficients of the loss at the step, as the ranks kept them."""
    return step.ranks[0]["coefficients"] if step.ranks else None


def _changed(step: RecordedStep, overrides: Sequence[str], judge: str, trusted: bool) -> WhatIf:
    """The step under other settings, or with other verdicts."""
    values = dict(step.config)
    if judge:
        if not asks_judge(values["reward"]):
            raise ConfigError(f"--judge: the reward of step {step.step} asks no judge")
        values["reward"] = with_judge(values["reward"], judge)
    _refuse_foreign(values, trusted)
    before = recorded_config(step.config)
    config = recorded_config(values, overrides)
    outcomes = complete(rewards(step, config.reward, trusted=trusted, asks=bool(judge)))
    now = decide(step, config.algorithm, outcomes.outcomes)
    decisions = recorded(step)
    trained = shares(decisions.trained, before, step), shares(now.trained, config, step)
    record = token_record(trained[0], step)
    computed = compute(trained[1], config.policy.loss, _state(step), record, same_plan=False)
    return what_if(step, outcomes, decisions, now, trained, record, computed)


def _report(result: Replayed, name: str, *, as_json: bool) -> int:
    """Print whether a step equals its record. Returns 0 when it does, else 1."""
    step = result.step
    members = sum(len(group.members) for group in step.groups)
    if as_json:
        values = {
            "step": step.step,
            "equal": result.equal,
            "groups": len(step.groups),
            "trajectories": members,
            "rewards_computed": result.rewards.computed,
            "rewards_as_recorded": result.rewards.reasons,
            "stages": {stage: asdict(count) for stage, count in result.counts.items()},
            "seconds": round(result.seconds, 3),
        }
        print(json.dumps(values), flush=True)
        return 0 if result.equal else 1
    stages = ", ".join(
        f"{count.equal:,} of {count.total:,} {stage}" for stage, count in result.counts.items()
    )
    verdict = "equals its record" if result.equal else "DIFFERS from its record"
    print(
        f"step {step.step} of {name} {verdict}: {len(step.groups)} groups, {members} trajectories;"
        f" equal are {stages} ({result.seconds:.1f} s)"
    )
    if result.rewards.reasons:
        number = len(result.rewards.as_recorded)
        print(f"  {number} rewards are as recorded: {'; '.join(result.rewards.reasons)}")
    for stage, count in result.counts.items():
        for difference in count.differences:
            print(f"  {stage}: {difference}", file=sys.stderr)
    return 0 if result.equal else 1


def _show(changes: WhatIf, *, as_json: bool) -> None:
    """Print the differences of a step: a table of groups, and the tokens that change most."""
    if as_json:
        print(json.dumps(changes.plain()), flush=True)
        return
    console = Console(soft_wrap=True, markup=False, highlight=False)
    groups = Table(
        *("group", "task", "reward", "trained", "largest |advantage|", "loss"),
        title=f"step {changes.step}: record -> with these values",
        box=None,
    )
    for group in changes.groups:
        groups.add_row(
            str(group.group),
            group.task,
            *(_pair(c) for c in (group.reward, group.trained, group.advantage, group.loss)),
        )
    groups.add_row("all", "", "", "", "", _pair(changes.loss))
    console.print(groups)
    for group in changes.groups:
        for status in group.statuses:
            console.print(f"group {group.group}, sample {status}")
    if changes.tokens:
        console.print(f"{len(changes.tokens):,} tokens change; most of all:")
        tokens = Table("group/sample", "segment/turn", "token", "advantage", "loss", box=None)
        for token in changes.tokens[:LISTED_TOKENS]:
            place = f"{token.group}/{token.sample}"
            turn = f"{token.segment}/{token.turn}"
            values = (_pair(token.advantage), _pair(token.loss))
            tokens.add_row(place, turn, str(token.token), *values)
        console.print(tokens)
    if changes.stand_ins:
        console.print(
            f"{changes.stand_ins:,} tokens were not trained then: the engine's log-probs stand for"
            " the trainer's"
        )
    if changes.rewards_as_recorded:
        console.print(f"rewards as recorded: {'; '.join(changes.rewards_as_recorded)}")


def _pair(change: Change) -> str:
    then, now = ("-" if value is None else f"{value:.4g}" for value in (change.then, change.now))
    return then if then == now else f"{then} -> {now}"
