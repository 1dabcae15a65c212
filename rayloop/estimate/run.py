"""Steps, trajectories, tokens and time of a run. An epoch is rows / groups_per_step steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rayloop.chat.tokenizer import read_json
from rayloop.core.failures import ConfigError, DataFailure, counted
from rayloop.data.images import image_geometry
from rayloop.data.rows import rows
from rayloop.envs.settings import EpisodeSettings
from rayloop.estimate.memory import Lengths
from rayloop.run.config import RunConfig
from rayloop.run.folder import RunFolder
from rayloop.run.preflight import Prepared

TOKEN_PIXELS = 28**2
"""Pixels of an image token of Qwen2.5-VL."""
_WARM_UP_STEPS = 1
"""First steps of a run that are not measured: caches are empty."""
_DURATION_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
"""Units of a duration, with their seconds."""


@dataclass(frozen=True)
class Measured:
    """Figures of a run's finished steps."""

    steps: int
    seconds: float
    """Median seconds of a step, without evaluations."""
    trajectories: float
    """Mean number of trajectories that a step trains on."""
    evaluation: float
    """Median seconds of an evaluation."""
    prompt: float
    """Mean tokens of a prompt."""
    response: float
    """Mean tokens of a response."""
    played_per_trained: float
    """Trajectories played for each one trained."""


def has_steps(run: Path) -> bool:
    """Whether a run in this folder has finished steps to measure."""
    return len(_finished_steps(run)) > _WARM_UP_STEPS


def _finished_steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in RunFolder.at(run.resolve()).metrics if "timing_s/step" in record]


def measured(run: Path) -> Measured:
    """The figures of the steps in ``metrics.jsonl``.

    Raises ConfigError when no step, or only the first, has been finished.
    """
    records = _finished_steps(run)
    if len(records) <= _WARM_UP_STEPS:
        raise ConfigError(
            f"{run} has {counted(len(records), 'finished step')}, and the first says little: let it"
            " do a few more"
        )
    warm_records = records[_WARM_UP_STEPS:]

    def values(name: str) -> list[float]:
        return [float(record[name]) for record in warm_records if record.get(name) is not None]

    step_seconds = [
        record["timing_s/step"] - (record.get("timing_s/testing") or 0.0) for record in warm_records
    ]
    # All records count: an evaluation needs no warm-up.
    evaluation_seconds = [
        float(record["timing_s/testing"]) for record in records if record.get("timing_s/testing")
    ]
    trained = values("rollout/trained")
    trajectories = values("rollout/trajectories")
    return Measured(
        steps=len(records),
        seconds=median(step_seconds),
        trajectories=fmean(trained),
        evaluation=median(evaluation_seconds) if evaluation_seconds else 0.0,
        prompt=fmean(values("prompt_length/mean")),
        response=fmean(values("response_length/mean")),
        played_per_trained=sum(trajectories) / sum(trained) if sum(trained) else math.nan,
    )


@dataclass(frozen=True)
class Plan:
    """The steps, trajectories, tokens and time of a run."""

    steps: int
    target: int
    """Trajectories that a step trains on."""
    rows: int | None
    """Rows of the data file; None without a file."""
    updates: int
    """Updates of the optimizer in a step."""
    trajectories: int
    """Trajectories that are played in all steps."""
    prompt: float
    """Tokens of a trajectory that are read."""
    response: float
    """Tokens of a trajectory that are written."""
    evaluations: int
    seconds: float | None
    """Seconds of the run; None when they are unknown."""
    groups: int
    """Groups of a step."""
    image_tokens: int
    """Tokens of a trajectory's images, all of the largest size."""
    held_out: int = 0
    """Tokens of an evaluation's trajectory; 0 when its limit is not above training's."""

    @property
    def tokens(self) -> float:
        """Tokens of all trajectories."""
        return self.trajectories * (self.prompt + self.response)


def most_image_tokens(prepared: Prepared) -> int:
    """The most tokens of an image, by the model's config.json; without one, as in Qwen2.5-VL."""
    settings = prepared.config.model
    try:
        content = read_json(prepared.model.files.folder / "config.json")
        geometry = image_geometry(content, settings.min_pixels, settings.max_pixels)
    except (ConfigError, KeyError):
        # The model may be on another machine, or take no images.
        return settings.max_pixels // TOKEN_PIXELS
    # The widest image leaves no pixel and no tile unused.
    patches = math.prod(geometry.grid(geometry.factor, geometry.max_pixels // geometry.factor))
    return patches // geometry.merge**2


def plan(
    config: RunConfig,
    found: Measured | None,
    tokens_per_image: int,
    step_seconds: float | None = None,
) -> Plan:
    """The plan of ``config``, timed by the measured steps of a run or by ``step_seconds``.

    Without measured lengths a trajectory is as long as the configuration allows: an upper bound.
    ``tokens_per_image``: ``most_image_tokens``.
    """
    algorithm = config.algorithm
    update = config.policy.update
    steps = config.steps
    max_prompt, max_response = _max_tokens(config, tokens_per_image)
    prompt = found.prompt if found else float(max_prompt)
    response = found.response if found else float(max_response)
    every = config.evaluation.every
    evaluations = config.evaluation.first + math.ceil(steps / every) if every else 0
    held_out = sum(_max_tokens(config.in_evaluation, tokens_per_image)) if evaluations else 0
    if held_out <= max_prompt + max_response:
        held_out = 0

    seconds = None
    if step_seconds is not None:
        seconds = step_seconds * steps
    elif found is not None:
        seconds_of_target = found.seconds * algorithm.target / found.trajectories
        seconds = seconds_of_target * steps + found.evaluation * evaluations
    trajectories = algorithm.target * steps * (found.played_per_trained if found else 1.0)
    return Plan(
        steps=steps,
        target=algorithm.target,
        rows=count(config.data.train),
        updates=update.epochs * update.mini_batches,
        trajectories=round(trajectories),
        prompt=prompt,
        response=response,
        evaluations=evaluations,
        seconds=seconds,
        groups=algorithm.groups_per_step,
        image_tokens=_image_tokens(config.environment.episode, tokens_per_image),
        held_out=held_out,
    )


def _max_tokens(config: RunConfig, tokens_per_image: int) -> tuple[int, int]:
    """The most tokens of a trajectory that are read and written in this configuration."""
    episode = config.environment.episode
    response_limit = min(episode.max_tokens, episode.max_response_tokens or episode.max_tokens)
    response = min(episode.max_turns * config.rollout.sampling.max_tokens, response_limit)
    if episode.max_turns == 1:
        return episode.max_prompt_tokens, response
    image_tokens = min(_image_tokens(episode, tokens_per_image), episode.max_tokens // 2)
    prompt = max(episode.max_tokens - response, image_tokens)
    return prompt, episode.max_tokens - prompt


def _image_tokens(episode: EpisodeSettings, tokens_per_image: int) -> int:
    """The most tokens of an episode's images, all of the largest size."""
    return min(episode.max_images, episode.max_turns) * tokens_per_image


def lengths(made: Plan) -> Lengths:
    """The plan's tokens of a trajectory, with images of the largest size."""
    prompt = round(made.prompt)
    images = min(made.image_tokens, prompt)
    return Lengths(prompt, round(made.response), images, made.held_out)


def count(path: str) -> int | None:
    """Rows of a data file; None when the file does not exist (yet)."""
    if not Path(path).is_file():
        return None
    return sum(not isinstance(row, DataFailure) for _, row in rows(Path(path)))


def lines(made: Plan, found: Measured | None) -> list[str]:
    """The lines that print the plan."""
    text = [
        f"{made.steps} steps of {made.groups} groups x {made.target // made.groups} ="
        f" {made.target} trajectories, {counted(made.updates, 'optimizer update')} each"
    ]
    if made.rows is not None:
        steps_per_epoch = made.rows / made.groups
        text.append(
            f"{counted(made.rows, 'row')}: {steps_per_epoch:.1f} steps an epoch,"
            f" {made.steps / steps_per_epoch:.2f} epochs in all"
        )
    bound = "" if found else " at most, since none has been measured"
    tokens = f"{made.prompt:.0f} read and {made.response:.0f} written in each{bound}"
    text.append(f"{made.trajectories} trajectories to play, {made.tokens:.3g} tokens: {tokens}")
    if made.evaluations:
        longer = ""
        if made.held_out:
            longer = f", whose trajectories have up to {made.held_out} tokens"
        text.append(f"{counted(made.evaluations, 'evaluation')}{longer}")
    if made.seconds is None:
        time = (
            "unknown until steps have been measured: run a few, then estimate --from RUN (or"
            " --step-seconds S)"
        )
    else:
        time = duration(made.seconds)
    return [*text, f"time: {time}"]


def duration(seconds: float) -> str:
    """A duration in a readable unit: 95 days, 4.2 hours, 12 minutes, 40 seconds."""
    for unit, size in _DURATION_UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def as_json(made: Plan) -> Mapping[str, Any]:
    """The plan as values that can be written as JSON."""
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
