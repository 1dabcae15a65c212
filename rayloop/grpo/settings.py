"""Settings of the algorithm (docs/algorithm.md gives the sections). No torch."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from rayloop.config.settings import Component, Role, SettingsModel, takes
from rayloop.grpo.filters import FILTER, EqualRewards, FilterSettings


class AdvantageSettings(SettingsModel):
    """What the formula of section 3 is made of. Defaults are verl's GRPO."""

    normalize_std: bool = True
    """Divide by the group's standard deviation.

    Off gives Dr. GRPO's advantage (arXiv:2503.20783).
    """
    eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation: 1e-6 in the verl family, 1e-4 in TRL.

    Change it only to reproduce one of them.
    """
    std: Literal["unbiased", "population"] = "unbiased"
    """Population is only there to express the formula of Chart-RVR (arXiv:2510.10973)."""
    std_floor: float = Field(0.0, ge=0)
    """The divisor is max(std_floor, std) + eps. The Chart-RVR paper floors it at 1."""
    baseline: Literal["mean", "binarised"] = "mean"
    """Binarised (PyVision's ``grpo_w_anb``): mean and std of ``score != 0``.

    The numerator keeps the score.
    """
    tolerance: float = Field(0.0, ge=0)
    """Rewards are all equal when max - min <= tolerance; their advantages are then exactly 0.

    Above 0 for noisy graders.
    """
    min_group: int = Field(2, ge=1)
    """A group with fewer scored members is excluded. 1 only makes sense with ``singleton: raw``."""
    singleton: Literal["error", "raw"] = "error"
    """A lone sample has no baseline.

    ``raw`` (verl's original) takes the reward itself as advantage.
    """
    permuted: bool = False
    """A control for evidence: each group's rewards are shuffled over its members first.

    There is then nothing to learn.
    """

    @model_validator(mode="after")
    def _singleton(self) -> Self:
        if self.min_group == 1 and self.singleton == "error":
            raise ValueError(
                "min_group: 1 admits lone samples, which singleton: error refuses; set"
                " singleton: raw"
            )
        return self


GRPO = "rayloop.grpo.advantage:Grpo"
KINDS = "rayloop.grpo.advantage_kinds"
ADVANTAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": (GRPO, {}),
    "dr_grpo": (GRPO, {"normalize_std": False}),
    "binarised": (GRPO, {"baseline": "binarised"}),
    "chart_rvr": (GRPO, {"std": "population", "std_floor": 1.0}),
    "raw": (GRPO, {"min_group": 1, "singleton": "raw"}),
    "permuted": (GRPO, {"permuted": True}),
    "rloo": (f"{KINDS}:Rloo", {}),
    "reinforce_pp": (f"{KINDS}:BatchScaled", {"centred": True}),
    "batch_std": (f"{KINDS}:BatchScaled", {}),
    "gdpo": (f"{KINDS}:Gdpo", {}),
    "maxrl": (f"{KINDS}:MaxRl", {}),
    "gigpo": (f"{KINDS}:Gigpo", {}),
    "turns": (f"{KINDS}:TurnReturns", {}),
    "distill": (f"{KINDS}:Distill", {}),
}
"""Each kind's component, and the settings that the kind presets."""


class AdvantageChoice(Component):
    """Section 3: the advantage with which a trajectory's tokens are trained.

    ``{kind: gigpo, with: {gamma: 0.9}}``, or a custom one: ``{use: "mine:advantage"}``
    (docs/bring_your_own/advantage.md).
    """

    use: str = ""
    """A custom advantage, ``package.module:name``, in place of a ``kind``; empty for none.

    Why a key: a new paper's formula can be tried without a change of this package.
    """
    kind: (
        Literal[
            "grpo",
            "dr_grpo",
            "binarised",
            "chart_rvr",
            "raw",
            "permuted",
            "rloo",
            "reinforce_pp",
            "batch_std",
            "gdpo",
            "maxrl",
            "gigpo",
            "turns",
            "distill",
        ]
        | None
    ) = None
    """grpo (the default): (reward - mean) / standard deviation.

    dr_grpo (arXiv:2503.20783): without the division, so groups that hardly differ weigh little.
    binarised (PyVision's ``grpo_w_anb``): mean and deviation of ``score != 0``, so that successes
    stay positive even when all are equal. chart_rvr: the population's deviation, 1 at least. raw:
    as grpo, and a lone sample's reward is its advantage (verl's original), for ``group_size: 1``.
    permuted: as grpo, with each group's rewards shuffled over its members first: a control from
    which nothing can be learned. rloo (arXiv:2402.14740): minus the mean of the others.
    reinforce_pp (REINFORCE++ baseline, arXiv:2501.03262) and batch_std (ScaleRL, arXiv:2510.13786):
    minus the group's mean, over the step's deviation of these differences, from which reinforce_pp
    first subtracts the step's mean. gdpo (arXiv:2601.05242): each component of ``with.weights`` is
    normalised separately. maxrl (arXiv:2602.02710): over the group's mean. gigpo
    (arXiv:2505.10978): also between turns of a group that saw the same screen. turns: discounted
    returns of each turn. distill: the KL to the reference alone, without a group.
    """

    @model_validator(mode="before")
    @classmethod
    def _use_or_kind(cls, data: Any) -> Any:
        # ``advantage: rloo`` is the kind alone.
        if isinstance(data, str):
            return {"kind": data}
        if not isinstance(data, Mapping):
            return data
        if data.get("use") and data.get("kind"):
            raise ValueError(
                f"kind: {data['kind']} and use: {data['use']} are two advantages; leave one out"
            )
        has_choice = data.get("use") or data.get("kind")
        return data if has_choice else {**data, "kind": "grpo"}

    def _component_of_kind(self) -> Component:
        use, preset = ADVANTAGES[self.kind or "grpo"]
        return Component(use=use, **{"with": {**preset, **self.with_}})

    def resolve(self) -> Callable[..., Any]:
        """The class or function. Raises ConfigError."""
        return super().resolve() if self.use else self._component_of_kind().resolve()

    def options(self) -> BaseModel | None:
        """``with`` over the kind's presets, validated.

        Raises ConfigError, pydantic.ValidationError.
        """
        return super().options() if self.use else self._component_of_kind().options()


ADVANTAGE = Role(
    "advantage",
    ("credits",),
    takes(
        "members",
        "advantage",
        "Write credits(members), which returns a number or a Credit for each scored member of a"
        " group",
    ),
)


class FilteringSettings(SettingsModel):
    """Section 4: oversample, filter, rank (DAPO's dynamic sampling, arXiv:2503.14476).

    It spends generated tokens to train on groups with a gradient.
    """

    filters: Annotated[tuple[FilterSettings, ...], FILTER] = (EqualRewards(),)
    """Filters that keep trajectories out of training.

    Where several refuse a trajectory, the first counts. A group may become partial. For example
    ``filters: [{kind: equal_rewards}, {kind: max_length, tokens: 4096}, {use: "mine:few_turns"}]``;
    ``filters: []`` trains everything. Custom filters: docs/bring_your_own/filter.md.
    """
    ranking: Literal["std", "fifo"] = "std"
    """std: groups with the largest spread first, ties in request order. fifo: first come first.

    The spread is that of rewards with grpo, dr_grpo, binarised, chart_rvr, raw and permuted, and
    that of advantages with other kinds. Where left-over groups are carried over, older groups go
    first, and the ranking orders the groups that the same version began.
    """
    groups_per_generation: int | None = Field(None, gt=0)
    """Groups started per generation batch; None: as many as a step needs.

    Raise it to oversample: ranking then has more to choose from. With ``max_staleness`` > 0 it only
    sizes the budget: no more may start than the bound leaves room for.
    """
    max_generation_batches: int = Field(4, ge=1)
    """Generation batches that a step may spend before it trains a smaller batch or stops.

    Raise it when few groups survive.
    """
    min_fraction: float = Field(0.5, gt=0, le=1)
    """Train a smaller batch when this share of the target survived, else stop.

    Lower it when small steps are better than none.
    """


class ReplaySettings(SettingsModel):
    """Section 5: replay of one stored success into a group of failures (ARPO, arXiv:2505.16282)."""

    kind: Literal["none", "corrected", "on_policy"] = "none"
    """corrected: replay, with the weight of the policy that sampled the success.

    It is for tasks so hard that whole groups fail again and again, and whose environment gives a
    result. on_policy: old log-probs recomputed and weight 1, only to reproduce ARPO.
    """

    @property
    def on(self) -> bool:
        """Whether successes are stored and replayed."""
        return self.kind != "none"


class StalenessSettings(SettingsModel):
    """Section 7: how far generation may run ahead of training, in steps."""

    max_staleness: int = Field(0, ge=0)
    """0: synchronous; a step waits for all groups in flight, and others start after its sync.

    Raise it until the trainer no longer waits for generation (``timing_s/gen``); more than that
    only makes samples older. Above 0, whole groups that a step leaves over compete again at the
    next one while they are fresh enough. It acts in ``GroupScheduler.admissible`` (which group may
    start), ``GroupRollout.any_due`` (whether a step waits), ``ReadyGroups.expire`` (what is too
    old) and ``AlgorithmSettings.synchronous``.
    """
    when_late: Literal["wait", "drop"] = "wait"
    """Treatment of a group in flight that would be too old at the next step.

    wait: the step waits for the group, so every length of episode is trained as often as it is
    played. drop: the group is thrown away when it ends; steps are up to 1.6 times as frequent and
    long episodes are trained as little as 0.3 times as often as played (docs/algorithm.md,
    section 7).
    """


class UpdateSettings(SettingsModel):
    """Optimizer updates per step.

    Mini-batches are cut at group boundaries, shuffled by the run's seed.
    """

    epochs: int = Field(1, ge=1)
    """Passes over the trajectories of a step.

    More use each sample again, further from the policy that drew it.
    """
    mini_batches: int = Field(1, ge=1)
    """Optimizer updates per epoch.

    1 is on-policy; more learn faster per sample, and then ``clip_*`` begins to matter.
    """


class AlgorithmSettings(SettingsModel):
    """GRPO: groups, advantages, filters, replay, staleness (arXiv:2402.03300)."""

    group_size: int = Field(8, ge=1)
    """Trajectories per task that share a baseline.

    Raise it when the baseline is noisy; the cost is proportional.
    """
    groups_per_step: int = Field(8, ge=1)
    """The target of a step is groups_per_step * group_size trajectories.

    Raise it for smoother steps, lower it for more of them.
    """
    advantage: Annotated[AdvantageChoice, ADVANTAGE] = AdvantageChoice(kind="grpo")
    filtering: FilteringSettings = FilteringSettings()
    replay: ReplaySettings = ReplaySettings()
    staleness: StalenessSettings = StalenessSettings()

    @property
    def target(self) -> int:
        """Trajectories of a step."""
        return self.group_size * self.groups_per_step

    @property
    def synchronous(self) -> bool:
        """Whether nothing is generated ahead of training (``max_staleness: 0``).

        Otherwise groups that did not fit into a step compete for the next one.
        """
        return self.staleness.max_staleness == 0
