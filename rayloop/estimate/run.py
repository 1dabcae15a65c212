"""Steps, trajectories, tokens and time of a run. An epoch is rows / groups_per_step steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rayloop.core.failures import ConfigError, DataFailure, counted
from rayloop.data.rows import rows
from rayloop.estimate.memory import Lengths
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder

FACTOR = 28
"""Pixels of a side of an image token, in Qwen2.5-VL."""
WARM = 1
"""First steps of a run that are not measured: caches are empty."""


@dataclass(frozen=True)
class Measured:
    """Of a run's finished steps: medians of seconds, mean tokens of a trajectory, trajectories
    played for each one trained.
    """

    steps: int
    seconds: float
    trajectories: float
    evaluation: float
    prompt: float
    response: float
    played_per_trained: float


def has_steps(run: Path) -> bool:
    """Whether a run there has finished steps to measure."""
    return len(_finished(run)) > WARM


def _finished(run: Path) -> list[dict[str, Any]]:
    return [record for record in RunFolder.at(run.resolve()).metrics if "timing_s/step" in record]


def measured(run: Path) -> Measured:
    """The steps in ``metrics.jsonl``.

    Raises ConfigError when no step, or only the first, has been finished.
    """
    records = _finished(run)
    if len(records) <= WARM:
        raise ConfigError(
            f"{run} has {counted(len(records), 'finished step')}, and the first says little: let it"
            " do a few more"
        )
    later = records[WARM:]

    def of(name: str) -> list[float]:
        return [float(record[name]) for record in later if record.get(name) is not None]

    testing = [
        float(record["timing_s/testing"]) for record in records if record.get("timing_s/testing")
    ]
    trained, played = sum(of("rollout/trained")), sum(of("rollout/trajectories"))
    return Measured(
        len(records),
        median(r["timing_s/step"] - (r.get("timing_s/testing") or 0.0) for r in later),
        fmean(of("rollout/trained")),
        median(testing) if testing else 0.0,
        fmean(of("prompt_length/mean")),
        fmean(of("response_length/mean")),
        played / trained if trained else math.nan,
    )


@dataclass(frozen=True)
class Plan:
    """``target``: trajectories that a step trains on, in ``groups``; ``updates``: of the optimizer
    in a step; ``prompt``, ``response``: tokens of a trajectory; ``held_out``: tokens of an
    evaluation's, 0 where its limit is not above training's; ``seconds``: None when unknown.
    """

    steps: int
    target: int
    rows: int | None
    updates: int
    trajectories: int
    prompt: float
    response: float
    evaluations: int
    seconds: float | None
    groups: int
    held_out: int = 0

    @property
    def tokens(self) -> float:
        """Tokens of all trajectories."""
        return self.trajectories * (self.prompt + self.response)


def plan(config: RunConfig, found: Measured | None, step_seconds: float | None = None) -> Plan:
    """The plan of ``config``, timed by the measured steps of a run or by ``step_seconds``.

    Without measured lengths a trajectory is as long as the configuration allows: an upper bound.
    """
    algorithm, update, steps = config.algorithm, config.policy.update, config.steps
    prompt, response = _bound(config)
    every = config.evaluation.every
    evaluations = config.evaluation.first + math.ceil(steps / every) if every else 0
    longest = sum(_bound(config.in_evaluation)) if evaluations else 0
    seconds = None if step_seconds is None else step_seconds * steps
    if seconds is None and found is not None:
        seconds = (
            found.seconds * algorithm.target / found.trajectories * steps
            + found.evaluation * evaluations
        )
    played = algorithm.target * steps * (found.played_per_trained if found else 1.0)
    return Plan(
        steps,
        algorithm.target,
        count(config.data.train),
        update.epochs * update.mini_batches,
        round(played),
        found.prompt if found else float(prompt),
        found.response if found else float(response),
        evaluations,
        seconds,
        algorithm.groups_per_step,
        longest if longest > prompt + response else 0,
    )


def _bound(config: RunConfig) -> tuple[int, int]:
    """Tokens of a trajectory that are read and written, as many as the configuration allows."""
    episode = config.environment.episode
    most = min(episode.max_tokens, episode.max_response_tokens or episode.max_tokens)
    response = min(episode.max_turns * config.rollout.sampling.max_tokens, most)
    if episode.max_turns == 1:
        return episode.max_prompt_tokens, response
    prompt = max(episode.max_tokens - response, min(_images(config), episode.max_tokens // 2))
    return prompt, episode.max_tokens - prompt


def _images(config: RunConfig) -> int:
    """Tokens of an episode's images, as many and as large as they may be."""
    episode = config.environment.episode
    return min(episode.max_images, episode.max_turns) * config.model.max_pixels // FACTOR**2


def lengths(config: RunConfig, made: Plan) -> Lengths:
    """The plan's tokens of a trajectory, its images as large as they may be."""
    prompt = round(made.prompt)
    return Lengths(prompt, round(made.response), min(_images(config), prompt), made.held_out)


def count(path: str) -> int | None:
    """Rows of a data file; None when there is no such file (yet)."""
    return (
        sum(not isinstance(row, DataFailure) for _, row in rows(Path(path)))
        if Path(path).is_file()
        else None
    )


def lines(config: RunConfig, made: Plan, found: Measured | None) -> list[str]:
    """The plan for people."""
    text = [
        f"{made.steps} steps of {made.groups} groups x {config.algorithm.group_size} ="
        f" {made.target} trajectories, {counted(made.updates, 'optimizer update')} each"
    ]
    if made.rows is not None:
        an_epoch = made.rows / made.groups
        text.append(
            f"{counted(made.rows, 'row')}: {an_epoch:.1f} steps an epoch,"
            f" {made.steps / an_epoch:.2f} epochs in all"
        )
    bound = "" if found else " at most, since none has been measured"
    each = f"{made.prompt:.0f} read and {made.response:.0f} written in each{bound}"
    text.append(f"{made.trajectories} trajectories to play, {made.tokens:.3g} tokens: {each}")
    if made.evaluations:
        longer = f", whose trajectories have up to {made.held_out} tokens" if made.held_out else ""
        text.append(f"{counted(made.evaluations, 'evaluation')}{longer}")
    unknown = (
        "unknown until steps have been measured: run a few, then estimate --from RUN (or"
        " --step-seconds S)"
    )
    return [*text, f"time: {unknown if made.seconds is None else duration(made.seconds)}"]


def duration(seconds: float) -> str:
    """For people: 95 days, 4.2 hours, 12 minutes, 40 seconds."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def as_json(made: Plan) -> Mapping[str, Any]:
    """The plan for programs."""
    return {
        "steps": made.steps,
        "trajectories_per_step": made.target,
        "updates_per_step": made.updates,
        "rows": made.rows,
        "trajectories": made.trajectories,
        "tokens": round(made.tokens),
        "seconds": made.seconds,
        "evaluations": made.evaluations,
    }
