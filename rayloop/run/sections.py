"""The sections of a run's configuration that belong to its roles, and to data and weights."""

from collections.abc import Callable, Collection
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rayloop.config.settings import Component, LocalPath, Role, SettingsModel, components
from rayloop.core.failures import DataFailure
from rayloop.data.dataset import Dataset
from rayloop.engines.settings import (
    FsdpSettings,
    GenerationSettings,
    ModelSettings,
    OptimizerSettings,
    TransformersEngineSettings,
)
from rayloop.envs.grammar.family import AUTO, LANGUAGE, LanguageChoice
from rayloop.envs.history.policies import HISTORY, WINDOW, component
from rayloop.envs.settings import ENVIRONMENT, EnvironmentKind, EpisodeSettings, SamplingSettings
from rayloop.grpo.losses.settings import LOSS, LossChoice, PpoLoss
from rayloop.grpo.settings import UpdateSettings
from rayloop.rewards.settings import RewardSettings
from rayloop.transports.settings import ObjectStoreTransport, TransportSettings


class Placement(SettingsModel):
    """What one actor of a role reserves in the Ray cluster."""

    num_cpus: float = Field(1.0, ge=0)
    """Cores that Ray counts as taken, and torch's threads where ``threads`` is null.

    Why a key: on a laptop of four cores all roles start only with fractions, and a judge that runs
    in the reward actor needs several.
    """
    num_gpus: float = Field(0.0, ge=0)
    """GPUs that are this actor's own.

    A fraction shares one GPU with other roles. Why a key: engines and trainer compute on GPUs with
    it, and a reward with a separate model on a part of one.
    """
    resources: dict[str, float] = {}
    """Custom Ray resources.

    Why a key: in a mixed cluster ranks belong to the nodes with the fast cards, and environments to
    the nodes with a browser, so each role names the resource of its nodes.
    """


class RoleSettings(SettingsModel):
    """What the roles have in common whose actors answer calls that may be made again elsewhere."""

    actors: int = Field(1, ge=1)
    """Processes of this role, many calls at once each; an engine or a reference holds the whole
    model. Why a key: more are needed when steps wait for them, when environments compute much or
    hang often, and to generate on more GPUs or nodes.
    """
    placement: Placement = Placement()


class ReferenceSettings(RoleSettings):
    """The actors that hold the reference, for ``policy.loss.kl_coef`` > 0.

    With LoRA and without ``path`` no actor starts: the reference is then the policy without its
    adapter.
    """

    path: LocalPath | None = None
    """Null: the start model.

    A folder or Hub name of another model with the same tokenizer and images: a teacher, for
    ``algorithm.advantage.kind: distill``. Or ``http://host:port/v1``: a server of vLLM that holds
    it, for texts sampled at temperature 1. Why a key: on-policy distillation needs a teacher, which
    is larger than the model that starts.
    """
    refresh_every: int | None = Field(None, ge=1)
    """Steps after which the start model's copies take over the policy's weights; null: never.

    Why a key: in runs of thousands of steps the KL to the start model ends all progress, and a new
    reference every few hundred steps restores it (ProRL, arXiv:2505.24864).
    """

    @property
    def server(self) -> str | None:
        """``path`` where it is a server."""
        if self.path and self.path.startswith(("http://", "https://")):
            return self.path
        return None

    def model(self, start: ModelSettings) -> ModelSettings:
        """The model of ``path`` that sees images as ``start`` does.

        ``start`` itself without a path, and for a server.
        """
        if not self.path or self.server:
            return start
        return start.model_copy(update={"path": self.path, "revision": None})


class DataSettings(SettingsModel):
    """The tasks: training rows, held-out rows, their reader and order."""

    train: LocalPath
    """JSONL, JSON array or parquet file of the training rows.

    Images are resolved relative to its folder.
    """
    eval: LocalPath | None = None
    """Held-out rows for ``evaluation``.

    Without them nothing shows whether the policy learns or memorises.
    """
    anywhere: bool = False
    """Rows may name images and videos outside of their file's folder.

    Why a key: data sets made for verl often have absolute paths of images, but rows of a stranger
    could show any file to the policy.
    """
    reader: Annotated[Component, Role("reader", ("task",))] = Component(
        use="rayloop.data.dataset:ChatRows"
    )
    """Turns a row into a task; by default verl's columns (prompt, images, reward_model, ...).

    Name your own for others.
    """
    order: Annotated[Component, Role("order", ("tier",))] | Literal["file"] | None = None
    """Which rows come first.

    None: a new order in each epoch, from the seed. file: that of the file. A curriculum for the
    first epoch: ``{use: "rayloop.recipes.arc_vision.data:LargeFirst"}`` or
    ``rayloop.run.order:BySolveRate``. Why a key: rows that somebody sorted from easy to hard must
    come in that order.
    """

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has a different order."""
        return self.order != "file"

    def rows(
        self, path: str, leave_out: Callable[[DataFailure], None], kinds: Collection[str] = ()
    ) -> Dataset:
        """The rows of the file ``path``, without the bad ones, which ``leave_out`` gets.

        ``kinds``: of ``environment``, which rows may name. Raises as ``Dataset``.
        """
        return Dataset(path, self.reader.build(), False, leave_out, kinds, anywhere=self.anywhere)


ENGINE = ("generate", "leave", "pause", "resume", "load", "health")


class RolloutSettings(RoleSettings):
    """The actors that generate."""

    engine: Annotated[GenerationSettings, Role("engine", ENGINE)] = TransformersEngineSettings()
    """The engine that generates: [engines](engines.md).

    How to write one: [engine](bring_your_own/engine.md).
    """
    sampling: SamplingSettings = SamplingSettings()
    deterministic: bool = False
    """Each group is decoded as its own batch and committed in request order: a resumed run equals
    an uninterrupted one bit for bit. Why a key: to find the cause of a difference between two runs
    they must be equal otherwise; group by group, decoding is slower.
    """


class EnvironmentSettings(RoleSettings):
    """The actors that play episodes."""

    language: Annotated[LanguageChoice, LANGUAGE] = AUTO
    """How the model writes its turns on screens, with their prompt, stop words and coordinates: the
    name of a language (docs/compatibility.md), a file, or ``{use: module:Class}`` with ``read`` and
    ``write``. ``auto``: that of ``model.path``, by its name and config.json. Environments with a
    screen and rewards that read turns have it. Why a key: a model trained on UI-TARS' turns may be
    in a folder of any name.
    """
    episode: EpisodeSettings = EpisodeSettings()
    kinds: Annotated[dict[str, EnvironmentKind], ENVIRONMENT] = {}
    """``{name: {use: module:Class, with: {...}, isolation: thread}}``: several kinds of environment
    in one run. A row names its own in the column ``environment``; a row without is played in
    ``episode.environment``. Empty: that column means nothing.
    """
    history: Annotated[Component, HISTORY, BeforeValidator(component)] = Component(use=WINDOW)
    """What the policy is shown of its past at each turn, and is trained on: ``full``,
    ``drop_thoughts``, ``{last_images: n}``, ``{last_turns: n}`` (older answers as a list of text),
    ``language`` (as the makers of the environment's action language) or ``{use: module:Class}``.

    Why a key: each family of models was trained with another past, and 50 screenshots do not fit
    into the context of a small model. Where a context does not continue the one before it, it is a
    separate sequence for the trainer.
    """
    placement: Placement = Placement(num_cpus=0.5)
    episodes_at_once: int | None = Field(None, ge=1)
    """Episodes that one actor plays at once; more of a group go to other actors.

    None: all that it is given. Set it where each episode needs separate memory or cores (browsers,
    desktops).
    """
    attempts: int = Field(3, ge=1)
    """How often an episode is played when its environment fails, before its trajectory is excluded.

    When so many episodes of one group hung, the others are not played and the task is quarantined.
    Why a key: virtual machines that fail in one of five starts need more attempts; 1 shows the
    first failure of an environment that is being repaired.
    """
    episode_timeout: float = Field(3600.0, gt=0)
    """Seconds for a whole episode, from the moment its actor begins it; beyond them it hangs, and
    is played again. A generation request has a sixth of them, after which its engine counts as
    lost. Raise it for long episodes and long turns, with ``recovery.stall_timeout``.
    """


def held_in(environment: EnvironmentSettings) -> str:
    """How environments and tools confine a policy's code, by their ``preflight(settings)``.

    Empty when none runs any.
    """
    said = []
    for _, part in components(environment):
        check = getattr(part.resolve(), "preflight", None)
        settings = part.options()
        if check is not None and settings is not None:
            said.append(check(settings))
    return "; ".join(dict.fromkeys(filter(None, said)))


class RewardPool(RewardSettings, RoleSettings):
    """The actors that score trajectories."""

    placement: Placement = Placement(num_cpus=0.5)


class PolicySettings(SettingsModel):
    """The actors that train: one for each FSDP rank."""

    ranks: int = Field(1, ge=1)
    """FSDP world size: one actor per rank.

    Raise it for more GPUs: memory per rank falls, and steps get faster.
    """
    engine: FsdpSettings = FsdpSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: Annotated[LossChoice, LOSS] = PpoLoss()
    """What an update minimises.

    Why a key: each paper has its own; mixture-of-experts models, for example, are unstable with
    ``ppo``, and their authors use ``gspo``.
    """
    update: UpdateSettings = UpdateSettings()
    placement: Placement = Placement()
    step_timeout: float = Field(3600.0, gt=0)
    """Seconds for one call of the trainer (step, checkpoint, export); an engine has a sixth of them
    to take over synced weights. Raise it for large steps, large models and slow networks, with
    ``recovery.stall_timeout``.
    """


class WeightSyncSettings(SettingsModel):
    """How weights reach the engines, and what is checked at the start."""

    transport: Annotated[
        TransportSettings, Role("transport", ("sender", "receiver", "deliver"))
    ] = ObjectStoreTransport()
    logprob_check: Literal["self_test", "stop", "warn"] = "self_test"
    """The log-prob check at the start: a mean |difference| of 1e-3 is allowed in float32, 0.05 in
    bfloat16. stop: the run ends when engines and trainer disagree. self_test: also perturb each
    group of parameters (not for large bfloat16 models). warn: as self_test, but continue.
    """
