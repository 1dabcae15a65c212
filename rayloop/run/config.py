"""The configuration of a run.

It is assembled from the settings classes that each part owns, and checked across parts.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rayloop.config.settings import Component, LocalPath, SettingsModel, check_components, load
from rayloop.core.failures import ConfigError
from rayloop.engines.machine import per_process
from rayloop.engines.settings import (
    CustomEngine,
    EngineChoice,
    FsdpSettings,
    ModelSettings,
    OptimizerSettings,
    TransformersEngineSettings,
)
from rayloop.envs.history.policies import Window, shows_everything
from rayloop.grpo.alarms import AlarmSettings
from rayloop.grpo.losses.settings import AdaptiveKl
from rayloop.grpo.settings import AlgorithmSettings
from rayloop.loggers.settings import LoggersSettings
from rayloop.run.lifetime import (
    EPISODES,
    SAMPLING,
    CheckpointSettings,
    EvaluationSettings,
    PreemptionSettings,
    ProfileSettings,
    RecoverySettings,
    ReportSettings,
    below,
    check_durations,
    with_time_to_compile,
)
from rayloop.run.place import from_start
from rayloop.run.sections import (
    DataSettings,
    EnvironmentSettings,
    Placement,
    PolicySettings,
    ReferenceSettings,
    RewardPool,
    RolloutSettings,
    WeightSyncSettings,
)
from rayloop.transports.settings import BroadcastTransport, Placed, TransportSettings, problems


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise ValueError(
            f"got {text!r}, expected letters, digits, '.', '_' and '-', beginning with a letter or"
            " digit"
        )
    return text


class RunConfig(SettingsModel):
    """One run. ``python -m rayloop train CONFIG --print-config`` shows it expanded."""

    name: Annotated[str, AfterValidator(_name)]
    """The run's folder below ``output``: letters, digits, ``.``, ``_`` and ``-``, beginning with a
    letter or digit.
    """
    output: LocalPath = "runs"
    """Folder of all runs. Set it to a file system that all nodes see when there are several."""
    seed: int = 0
    """Everything random follows from it: order of the tasks, sampling, updates.

    Change it to repeat an experiment independently.
    """
    steps: int = Field(gt=0)
    """All steps of the run, including an earlier attempt's: raise it to continue a run that is
    done.
    """
    model: ModelSettings
    data: DataSettings
    environment: EnvironmentSettings = EnvironmentSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardPool
    reference: ReferenceSettings = ReferenceSettings()
    policy: PolicySettings = PolicySettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    weight_sync: WeightSyncSettings = WeightSyncSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    report: ReportSettings = ReportSettings()
    profile: ProfileSettings = ProfileSettings()
    alarms: AlarmSettings = AlarmSettings()
    recovery: RecoverySettings = RecoverySettings()
    preemption: PreemptionSettings = PreemptionSettings()
    loggers: LoggersSettings = ()
    """Where metrics go besides ``metrics.jsonl`` and Prometheus, such as ``loggers: [{kind:
    tensorboard}, {use: "mine:Logger"}]`` (docs/bring_your_own/metric.md). One that fails is dropped
    with an event; the run continues. Why a key: each team watches its runs in one tool, W&B or
    TensorBoard, and needs an account or a package for it.
    """
    keep_rollouts: Literal["all"] | Annotated[int, Field(ge=0)] = 4
    """Groups per step written to ``rollouts/`` with texts and images, two completions of one of
    them also to the terminal; 0: none; all: every group, with what ``replay`` needs. Why a key: to
    see how a policy exploits its reward, raise it; to compute a step again elsewhere, set all;
    where screenshots fill the disk, set 0.
    """

    @model_validator(mode="before")
    @classmethod
    def _slow_start(cls, data: Any) -> Any:
        """An engine that compiles when it starts on a GPU has the time for it.

        A configuration that sets the time is left alone.
        """
        # Before validation, since afterwards a default looks like a value that was set.
        return with_time_to_compile(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _across_parts(self) -> Self:
        for problem in (
            *_problems(self),
            *_reference_problems(self),
            *_history_problems(self.environment),
            *_engine_problems(self),
            *_transport_problems(self),
        ):
            raise ValueError(problem)
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output) / self.name

    @property
    def engine(self) -> EngineChoice:
        """``rollout.engine`` on its actor's GPUs, with room for an episode.

        A custom engine computes in the trainer's dtype.
        """
        engine = self.rollout.engine
        if isinstance(engine, Component):
            return CustomEngine(component=engine, dtype=self.policy.engine.dtype)
        placed = engine.placed(self.rollout.placement.num_gpus, self.longest)
        if isinstance(placed, TransformersEngineSettings) and placed.threads is None:
            return placed.model_copy(
                update={"threads": self._threads(self.rollout.placement, self.rollout.actors)}
            )
        return placed

    @property
    def in_evaluation(self) -> Self:
        """The run as its evaluations play it: with the values of ``evaluation.over``."""
        over = self.evaluation.over
        if not over:
            return self
        environment = self.environment
        rollout = self.rollout
        episode = environment.episode.model_copy(update=dict(below(over, EPISODES)))
        sampling = rollout.sampling.model_copy(update=dict(below(over, SAMPLING)))
        # pydantic's ``model_copy`` validates nothing:
        # ``_over`` has read these values by their own classes.
        return self.model_copy(
            update={
                "environment": environment.model_copy(update={"episode": episode}),
                "rollout": rollout.model_copy(update={"sampling": sampling}),
            }
        )

    @property
    def longest(self) -> int:
        """The most tokens of an episode that an engine must hold, including evaluations."""
        return max(each.environment.episode.max_tokens for each in (self, self.in_evaluation))

    @property
    def reference_kind(self) -> Literal["none", "actor", "adapter_off"]:
        """The source of the reference's log-probs.

        ``actor`` with a separate model, or the policy without its adapter.
        """
        if not self.policy.loss.uses_kl:
            return "none"
        has_own_model = self.policy.engine.lora is None or self.reference.path
        return "actor" if has_own_model else "adapter_off"

    @property
    def optimizer(self) -> OptimizerSettings:
        """``policy.optimizer``, whose schedule has the length of the run."""
        update = self.policy.update
        return self.policy.optimizer.over(self.steps, update.epochs * update.mini_batches)

    @property
    def sync_timeout(self) -> float:
        """Seconds for an engine to take over synced weights.

        Each wait within a broadcast has a fifth of them at most.
        """
        return self.policy.step_timeout / 6

    @property
    def transport(self) -> TransportSettings:
        """``weight_sync.transport``, with waits that fit into ``sync_timeout``.

        All ``receivers`` of the engine take part in it.
        """
        transport = self.weight_sync.transport
        if isinstance(transport, BroadcastTransport):
            return transport.within(self.sync_timeout, self.engine.receivers)
        return transport

    @property
    def trainer(self) -> FsdpSettings:
        """``policy.engine`` as the ranks have it."""
        return self._scoring(self.policy.placement, self.policy.ranks)

    @property
    def scorer(self) -> FsdpSettings:
        """``policy.engine`` as the reference actors have it, which compute while the engines do."""
        return self._scoring(self.reference.placement, self.reference.actors + self.rollout.actors)

    def _scoring(self, placement: Placement, processes: int) -> FsdpSettings:
        engine = self.policy.engine
        if engine.threads:
            return engine
        return engine.model_copy(update={"threads": self._threads(placement, processes)})

    def _threads(self, placement: Placement, processes: int) -> int | None:
        """Returns the torch threads of one of ``processes`` that compute at the same time.

        None: the actor's ``num_cpus``, on GPUs and with ``rollout.deterministic``, where a resumed
        run must not depend on the machine's cores.
        """
        if placement.num_gpus or self.rollout.deterministic:
            return None
        if not self.algorithm.synchronous:
            processes = self.policy.ranks + self.rollout.actors
        return per_process(processes)

    @property
    def tolerance(self) -> float:
        """Mean |log-prob difference| in nats that the log-prob check allows."""
        return 0.05 if self.rounds else 1e-3

    @property
    def rounds(self) -> bool:
        """Whether trainer or engine computes in bfloat16.

        Their log-probs then differ by its rounding.
        """
        return "bfloat16" in (self.policy.engine.dtype, self.engine.dtype)

    @property
    def drift(self) -> float:
        """Mean |log-prob difference| of fresh samples that raises an alarm.

        docs/algorithm.md, section 10.
        """
        return 0.1 if self.rounds else 1e-3


_IN_EVALUATION = " in evaluations (evaluation.over)"


def read(path: Path, overrides: list[str], over: Sequence[Path] = ()) -> RunConfig:
    """The checked configuration, with the files ``over`` laid over it.

    Raises ConfigError with file and line.
    """
    config = load(path, overrides, RunConfig, over)
    config = from_start(config, path.parent)
    check_components(config)
    check_durations(config)
    check_durations(config.in_evaluation, _IN_EVALUATION)
    return config


def _problems(c: RunConfig) -> Any:
    a = c.algorithm
    yield from _advantage_problems(c)
    unmeasured = c.data.eval is None or not c.evaluation.every
    if unmeasured and c.evaluation.patience:
        yield (
            "evaluation.patience goes by the held-out reward, which this run never measures: set"
            " data.eval and evaluation.every"
        )

    if c.rollout.deterministic and not a.synchronous:
        yield (
            "rollout.deterministic promises bit-equal resumption, which max_staleness:"
            f" {a.staleness.max_staleness} cannot keep; set it to 0"
        )
    if c.policy.update.mini_batches > a.groups_per_step:
        yield (
            f"policy.update.mini_batches ({c.policy.update.mini_batches}) are cut at group"
            f" boundaries, and a step has only {a.groups_per_step} groups"
        )

    for where, each in {"": c, _IN_EVALUATION: c.in_evaluation}.items():
        episode = each.environment.episode
        room = each.rollout.sampling.max_tokens
        yield from each.engine.mask_problems(each.rollout.sampling.sampling(), where)
        if episode.max_prompt_tokens + room > episode.max_tokens:
            yield (
                f"a prompt of max_prompt_tokens ({episode.max_prompt_tokens}) and one turn of"
                f" sampling.max_tokens ({room}) make {episode.max_prompt_tokens + room}"
                f" tokens{where}, above episode.max_tokens ({episode.max_tokens})"
            )

    per = a.filtering.groups_per_generation or a.groups_per_step
    if (
        per * a.filtering.max_generation_batches * a.group_size
        < a.target * a.filtering.min_fraction
    ):
        yield (
            f"{a.filtering.max_generation_batches} generation batches of {per} groups make "
            f"{per * a.filtering.max_generation_batches * a.group_size} trajectories at most; "
            f"min_fraction asks for {a.target * a.filtering.min_fraction:.0f} of {a.target}"
        )


def _advantage_problems(c: RunConfig) -> Any:
    """What the advantage needs and the run has not."""
    kind = c.algorithm.advantage.kind
    loss = c.policy.loss
    if c.algorithm.group_size == 1 and kind not in ("raw", "distill", None):
        yield (
            "algorithm.group_size is 1: a lone sample has no baseline. Use at least 2, or"
            " advantage.kind: raw"
        )
    least = c.algorithm.advantage.with_.get("min_group")
    size = c.algorithm.group_size
    if isinstance(least, int) and least > size:
        yield (
            f"algorithm.advantage.with.min_group ({least}) is above algorithm.group_size ({size}):"
            " no group has as many members"
        )

    if kind in ("turns", "gigpo") and c.environment.episode.max_turns == 1:
        yield (
            f"algorithm.advantage.kind: {kind} compares turns, and environment.episode.max_turns is"
            " 1: raise it, or use grpo"
        )
    if kind == "gdpo" and not c.algorithm.advantage.with_.get("weights"):
        yield (
            "algorithm.advantage.kind: gdpo needs the components that it normalises: set"
            " with.weights, as {iou: 1.0, format: 0.5}"
        )

    if kind == "distill" and not (loss.uses_kl and c.reference.path):
        yield (
            "algorithm.advantage.kind: distill has the KL to a teacher as its loss: set"
            " reference.path to the teacher, policy.loss.kl_coef to 1 and policy.loss.kl to k2"
        )
    follows = loss.kl_term.unbiased or loss.kl_term.estimator in ("k2", "k3+")
    if kind == "distill" and (loss.kl_term.where == "reward" or not follows):
        yield (
            f"policy.loss.kl: {loss.kl} has not the gradient that advantage.kind: distill follows;"
            " set k2 or k3+"
        )
    if kind == "distill" and loss.entropy_coef != 0:
        yield (
            "policy.loss.entropy_coef is part of the policy gradient, which advantage.kind: distill"
            " leaves out; set it to 0"
        )
    if kind == "distill" and loss.perception is not None:
        yield (
            "policy.loss.perception is part of the policy gradient, which advantage.kind: distill"
            " leaves out; leave it out, too"
        )

    most = c.algorithm.target * c.policy.update.epochs / 5
    if isinstance(loss.kl_coef, AdaptiveKl) and loss.kl_coef.horizon <= most:
        yield (
            f"policy.loss.kl_coef.horizon: {loss.kl_coef.horizon:g} can take the coefficient to 0"
            f" at once; set it above {most:g}"
        )
    if loss.uses_kl and loss.kl_term.where == "reward":
        yield from _begins_again(c.environment)


def _history_problems(environment: EnvironmentSettings) -> Any:
    """Settings of the history that no episode could follow."""
    if shows_everything(environment.history):
        return
    images = None
    # ``check_components`` says where a component is named that cannot be imported.
    with suppress(ConfigError):
        window = environment.history.options()
        images = window.last_images if isinstance(window, Window.Settings) else None
    if images is not None and images > environment.episode.max_images:
        yield (
            f"environment.history shows {images} images, and environment.episode.max_images is"
            f" {environment.episode.max_images}: no episode would see the last one"
        )
    agents = _agents(environment)
    if len(agents) == 1 + len(environment.kinds):
        yield (
            f"environment.history does nothing: {agents[0]} decides itself what the policy sees."
            " Leave it out"
        )


def _begins_again(environment: EnvironmentSettings) -> Any:
    """Why trajectories may have several segments, over which KL in the reward has no return."""
    needs = "policy.loss.kl in the reward needs trajectories of one sequence"
    if not shows_everything(environment.history):
        yield f"{needs}: set environment.history to full"
    for agent in _agents(environment):
        yield f"{needs}, and an agent ({agent}) may begin again: leave `in: reward` out"


def _agents(environment: EnvironmentSettings) -> list[str]:
    """The names of the environments in which an agent decides what the policy sees."""
    agents = []
    for kind in (environment.episode.environment, *environment.kinds.values()):
        # ``check_components`` says where a component is named that cannot be imported.
        with suppress(ConfigError):
            if kind.agent_driven:
                agents.append(kind.name)
    return agents


def _reference_problems(c: RunConfig) -> Any:
    """What the reference cannot do."""
    reference = c.reference
    sampling = c.rollout.sampling
    if reference.path and not c.policy.loss.uses_kl:
        yield (
            "reference.path is of use to the KL term alone: set policy.loss.kl_coef above 0, or"
            " leave it out"
        )
    if reference.refresh_every and reference.path:
        yield (
            f"reference.refresh_every would replace {reference.path} by the policy: leave it or"
            " reference.path out"
        )
    elif reference.refresh_every and c.reference_kind != "actor":
        why = "policy.engine.lora leaves the policy without its adapter for"
        if c.reference_kind == "none":
            why = "no KL term reads"
        yield (
            f"reference.refresh_every renews copies of the model, and {why} the reference: leave"
            " it out"
        )
    if reference.server and (
        sampling.temperature != 1 or sampling.min_tokens or sampling.top_p < 1 or sampling.top_k
    ):
        yield (
            f"reference.path: {reference.server} gives log-probs of unchanged distributions: set"
            " rollout.sampling.temperature and top_p to 1, min_tokens to 0 and top_k to null, or"
            " name a folder"
        )


def _engine_problems(c: RunConfig) -> Any:
    """What the engine cannot do, or not where it is placed."""
    if c.rollout.deterministic and not c.engine.cohorts:
        yield (
            "rollout.deterministic: only engine.kind: transformers decodes a group as its own"
            f" batch, {c.engine.label} does not"
        )
    yield from c.engine.unshared(
        c.rollout.placement.num_gpus,
        c.policy.placement.num_gpus,
        synchronous=c.algorithm.synchronous,
    )
    yield from c.engine.problems(c.rollout.placement.num_gpus, c.longest)


def _transport_problems(c: RunConfig) -> Any:
    yield from problems(
        c.weight_sync.transport, Placed(c.policy.placement.num_gpus, c.rollout.placement.num_gpus)
    )
    if c.engine.sleep and isinstance(c.weight_sync.transport, BroadcastTransport):
        yield (
            "weight_sync.transport.kind: engines that share GPUs in turns are asleep while the"
            " policy sends; use object_store"
        )
