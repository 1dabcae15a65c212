"""Settings of checkpoints, evaluation, reports, recovery and preemption; the order of durations.

No torch, no ray.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from rayloop.config.settings import Component, LocalPath, SettingsModel
from rayloop.core.failures import ConfigError
from rayloop.envs.settings import EpisodeSettings, SamplingSettings

COMPILING = ("vllm", "sglang")
"""Engines that compile and capture graphs when they start on a GPU."""
COMPILED_START_TIMEOUT_S = 1200.0
"""Seconds that they have for it by default (``recovery.start_timeout``); nothing has measured it
yet (benchmarks/gpu).
"""


class CheckpointSettings(SettingsModel):
    """When checkpoints are written, kept and restored."""

    every: int = Field(10, ge=1)
    """Steps between checkpoints; the last is always saved.

    Lower it where machines may be lost, raise it when saving is slow.
    """
    asynchronous: bool = False
    """Training continues while a checkpoint is written, from a copy in the memory of the ranks'
    machines, as large as the checkpoint (docs/reliability.md). Why a key: on slow storage a save
    takes as long as a step, but not every machine has the memory for the copy.
    """
    keep: int = Field(2, ge=1)
    """Complete checkpoints that stay on disk; each is the weights and the optimizer's state.

    Raise it to go back further.
    """
    resume: LocalPath = "auto"
    """auto: continue from the newest complete checkpoint; never; or the folder of a checkpoint,
    from which every start begins and plays quarantined rows again. Why a key: after the repair of a
    broken environment, name a checkpoint before the damage, once.
    """

    @property
    def named(self) -> bool:
        """Whether ``resume`` is the folder of a checkpoint."""
        return self.resume not in ("auto", "never")


_RIGHT = re.compile(r"([\w/.:-]+)(?:\s*>=\s*(-?[\d.]+))?")


def right(solved: str) -> tuple[str, float]:
    """The score of ``evaluation.solved``, and the least value of it that is right.

    Raises ValueError for another text.
    """
    match = _RIGHT.fullmatch(solved.strip())
    if match is None:
        raise ValueError(f"got {solved!r}, expected the name of a score, or `name >= number`")
    return match[1], float(match[2] or 1.0)


def _solved(text: str) -> str:
    right(text)
    return text


EPISODES = "environment.episode"
SAMPLING = "rollout.sampling"
CHANGEABLE: Mapping[str, tuple[type[SettingsModel], frozenset[str]]] = {
    EPISODES: (EpisodeSettings, frozenset(EpisodeSettings.model_fields) - {"environment"}),
    SAMPLING: (SamplingSettings, frozenset(SamplingSettings.model_fields)),
}
"""The sections whose keys an evaluation can change, their classes, and those keys."""


def below(over: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """Names and values of ``evaluation.over`` that are keys of ``section``."""
    for key, value in over.items():
        where, _, name = key.rpartition(".")
        if where == section:
            yield name, value


def _over(written: dict[str, Any]) -> dict[str, Any]:
    """The values as their own classes read them."""
    values: dict[str, Any] = {}
    for key, value in written.items():
        section, _, name = key.rpartition(".")
        model, names = CHANGEABLE.get(section, (SettingsModel, frozenset[str]()))
        if name not in names:
            keys = "; ".join(
                f"{at}.({', '.join(sorted(names))})" for at, (_, names) in CHANGEABLE.items()
            )
            written_so = "evaluation.over={environment.episode.max_turns: 3}"
            raise ValueError(
                f"{key!r} is not a key that an evaluation can change. Write for example"
                f" {written_so}. Keys are {keys}"
            )
        try:
            values[key] = getattr(model.model_validate({name: value}), name)
        except ValidationError as error:
            raise ValueError(f"{key}: got {value!r}: {error.errors()[0]['msg']}") from error
    return values


class EvaluationSettings(SettingsModel):
    """The evaluation on held-out rows during the run."""

    every: int = Field(0, ge=0)
    """Steps between evaluations on ``data.eval``, with one before the first and one after the last
    step; 0: none at all.
    """
    first: bool = True
    """Whether there is an evaluation before the first step; false is verl's ``val_before_train:
    false``. Without it the gain is that since the first evaluation.
    """
    over: Annotated[dict[str, Any], AfterValidator(_over)] = {}
    """Keys of ``environment.episode`` and ``rollout.sampling``, with the values that they have in
    evaluations, also in those by ``eval``: ``{environment.episode.max_turns: 30,
    rollout.sampling.top_p: 0.9}``. It needs ``greedy: false`` or ``samples``.
    """
    limit: int | None = Field(None, gt=0)
    """Rows evaluated, evenly over sources and file, always the same; None: all.

    Set it when evaluation takes too long.
    """
    patience: int | None = Field(None, ge=1)
    """Evaluations in a row without a better held-out reward after which the run ends, as finished;
    None: never. ``checkpoints/best`` keeps the best one's. Set it where more steps may only
    overfit.
    """
    greedy: bool = True
    """The likeliest answer instead of a sampled one: less noise, but not the policy that is
    trained.
    """
    samples: int = Field(0, ge=0)
    """Answers per row that are sampled as in training, besides the greedy one: their mean is the
    reward that is trained, in a separate curve. 4 show a gain of a few hundredths on a hundred
    rows. With ``greedy: false`` there is nothing but them.
    """
    solved: Annotated[str, AfterValidator(_solved)] = "reward"
    """Which answers are right, for pass@k and for the tasks that a policy can solve: at least 1 in
    the reward, or in one of its components, such as ``success``; ``iou >= 0.5`` for a share. The
    tables of ``eval`` show this score.
    """
    by: tuple[str, ...] = ()
    """Columns of the rows by whose values ``eval`` shows the means, in place of the rows' source,
    such as ``platform`` and ``element`` of ScreenSpot; ``platform+element`` by both together.
    """
    controls: bool = False
    """Before the first and after the last step, also play wrong images: does the policy look?

    On for evidence about images.
    """
    blind: Component | None = None
    """The best answers without an image, fitted on ``data.train``, as another control
    (rayloop/measure/controls.py), for example ``{use:
    "rayloop.recipes.arc_vision.boxes:BlindBox"}``.
    """

    @model_validator(mode="after")
    def _sampled(self) -> Self:
        for key in (f"{SAMPLING}.{name}" for name in ("temperature", "top_p", "top_k")):
            if key in self.over and self.greedy and not self.samples:
                raise ValueError(
                    f"over: {key} has no effect on greedy answers, and no others are played: set"
                    " greedy: false, or samples"
                )
        return self


class ReportSettings(SettingsModel):
    """What report.html draws."""

    boxes: Component | None = None
    """Finds the boxes of ground truths and answers, which the report draws over the images, for
    example ``{use: "rayloop.recipes.arc_vision.boxes:GroundingBoxes"}``.
    """


class ProfileSettings(SettingsModel):
    """What of the run is profiled, for ui.perfetto.dev."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps of which ``profile/step_000003/`` gets torch's profile of each policy rank, engine and
    reference, and ``timeline.json``: what each actor did when. They take longer themselves. Why a
    key: when steps are slow, name one or two of them on the command line to see why.
    """


class RecoverySettings(SettingsModel):
    """How often, and within what time, actors are replaced."""

    replacements: int = Field(12, ge=0)
    """Times an hour that one actor may be replaced; the policy group is rebuilt half as often, a
    driver restarted a sixth as often. Why a key: spot machines that are taken away every few
    minutes need more; 0 shows why an actor died.
    """
    health_timeout: float = Field(30.0, gt=0)
    """Seconds an actor, a policy rank or the driver may give no sign of life before it is replaced
    (they answer while they compute); a sixth of them lies between two checks of idle actors. Why a
    key: a swapping node, libraries on slow storage or hundreds of actors answer later than that.
    """
    start_timeout: float = Field(300.0, gt=0)
    """Seconds for placing and starting an actor, and for storage that refuses checkpoints to come
    back; on GPUs 1,200 with vLLM and SGLang, which compile. Raise it where nodes come late, and for
    large models on slow storage; the policy's ranks have 600 at least.
    """
    stall_timeout: float = Field(4500.0, gt=0)
    """Seconds without progress after which the run stops; after 30 s a stall is reported, with
    stacks. Keep it above the longest single call (docs/choosing_settings.md has the order of all
    durations).
    """

    @property
    def policy_restarts(self) -> int:
        """Times an hour that the policy group may be rebuilt.

        A rebuild costs more than a replacement.
        """
        return math.ceil(self.replacements / 2)

    @property
    def driver_restarts(self) -> int:
        """Times an hour that a driver may be restarted."""
        return math.ceil(self.replacements / 6)

    @property
    def health_every(self) -> float:
        """Seconds between two health checks of idle actors."""
        return self.health_timeout / 6

    @property
    def stall_report(self) -> float:
        """Seconds after which a stall is reported.

        30, and sooner where the run must stop within minutes.
        """
        return min(30.0, self.stall_timeout / 10)


def with_time_to_compile(data: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings, with ``recovery.start_timeout`` for an engine that compiles.

    It is added where it is left out and the engine needs more than the default.
    """
    rollout = data.get("rollout")
    recovery = data.get("recovery", {})
    # The data are not validated yet, so that each may be anything.
    if not isinstance(rollout, Mapping) or not isinstance(recovery, Mapping):
        return dict(data)
    engine = rollout.get("engine")
    placement = rollout.get("placement")
    compiles = isinstance(engine, Mapping) and engine.get("kind") in COMPILING
    on_gpu = isinstance(placement, Mapping) and placement.get("num_gpus")
    if "start_timeout" in recovery or not (compiles and on_gpu):
        return dict(data)
    return {**data, "recovery": {**recovery, "start_timeout": COMPILED_START_TIMEOUT_S}}


class PreemptionSettings(SettingsModel):
    """What happens after SIGTERM, SIGINT, or the SIGHUP of a closed terminal."""

    grace: float = Field(120.0, gt=0)
    """Seconds after such a signal within which the run must be saved; an update under way is
    finished first. Below what the scheduler allows: the lead of Slurm's ``--signal``; Ray gives a
    stopped job 600 s on clusters that we start.
    """


EPISODE = "environment.episode_timeout"
STALL = "recovery.stall_timeout"


@dataclass(frozen=True)
class Duration:
    """A key in seconds. It must be shorter than the key ``within``, taken ``times`` times."""

    key: str
    within: str = ""
    times: int = 1


DURATIONS = (
    Duration("environment.episode.step_timeout", EPISODE, 2),
    Duration(EPISODE, STALL),
    Duration("reward.timeout", STALL, 2),
    Duration("policy.step_timeout", STALL),
    Duration("recovery.health_timeout"),
    Duration("recovery.start_timeout", STALL),
    Duration(STALL),
    Duration("preemption.grace"),
)
"""From the innermost wait to the outermost; those without ``within`` are bounded by nothing in the
configuration.
"""


def check_durations(config: BaseModel, where: str = "") -> None:
    """Raises ConfigError unless each duration is shorter than the one that waits for it.

    The error names all others with their values. ``where`` says of which part of the run these
    values are.
    """
    problems = list(_late(config, where))
    if problems:
        raise ConfigError("\n".join(problems))


def _late(config: BaseModel, where: str) -> Iterator[str]:
    for outer in dict.fromkeys(each.within for each in DURATIONS if each.within):
        limit = value_of(config, outer)
        violations = [
            each
            for each in DURATIONS
            if each.within == outer and _seconds(config, each) >= (limit or 0.0)
        ]
        if limit is not None and violations:
            calls = ", ".join(
                f"{f'{each.times} x ' * (each.times > 1)}{each.key} ({_seconds(config, each):g} s)"
                for each in violations
            )
            yield (
                f"{outer} ({limit:g} s) must be longer than {calls}, which it waits for{where}."
                " Raise it, or lower what is named"
            )


def _seconds(config: BaseModel, each: Duration) -> float:
    return each.times * (value_of(config, each.key) or 0.0)


def value_of(config: BaseModel, key: str) -> float | None:
    """Seconds; None where there is no such key."""
    place: object = config
    for name in key.split("."):
        if not isinstance(place, BaseModel) or name not in type(place).model_fields:
            return None
        place = place.__dict__[name]
    return float(str(place))
