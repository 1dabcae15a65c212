"""Settings of the algorithm, beside its code (docs/algorithm.md gives the sections). No torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.grpo.filters import FILTER, EqualRewards, FilterSettings


class AdvantageSettings(SettingsModel):
    """What the formula of section 3 is made of; a run chooses one of ``ADVANTAGES``. Defaults are verl's GRPO."""

    normalize_std: bool = True
    """Divide by the group's standard deviation. Off gives Dr. GRPO's advantage (arXiv:2503.20783)."""
    eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation: 1e-6 in the verl family, 1e-4 in TRL. Change it only to reproduce one of them."""
    std: Literal["unbiased", "population"] = "unbiased"
    """Population is only there to express the formula of Chart-RVR (arXiv:2510.10973)."""
    std_floor: float = Field(0.0, ge=0)
    """The divisor is max(std_floor, std) + eps. The Chart-RVR paper floors it at 1."""
    baseline: Literal["mean", "binarised"] = "mean"
    """Binarised (PyVision's ``grpo_w_anb``): mean and std of ``score != 0``; the numerator keeps the score."""
    tolerance: float = Field(0.0, ge=0)
    """Rewards are all equal when max - min <= tolerance; their advantages are then exactly 0. Above 0 for noisy graders."""
    min_group: int = Field(2, ge=1)
    """A group with fewer scored members is excluded. 1 only makes sense with ``singleton: raw``."""
    singleton: Literal["error", "raw"] = "error"
    """A lone sample has no baseline. ``raw`` (verl's original) takes the reward itself as advantage."""
    permuted: bool = False
    """A control for evidence: each group's rewards are shuffled over its members first, so that there is nothing to learn."""

    @model_validator(mode="after")
    def _singleton(self) -> AdvantageSettings:
        if self.min_group == 1 and self.singleton == "error":
            raise ValueError("min_group: 1 admits lone samples, which singleton: error refuses; set singleton: raw")
        return self


ADVANTAGES = {
    "grpo": AdvantageSettings(),
    "dr_grpo": AdvantageSettings(normalize_std=False),
    "binarised": AdvantageSettings(baseline="binarised"),
    "chart_rvr": AdvantageSettings(std="population", std_floor=1.0),
    "raw": AdvantageSettings(min_group=1, singleton="raw"),
    "permuted": AdvantageSettings(permuted=True),
}
"""The formulas of the works that this project unifies, and a control."""


class AdvantageChoice(SettingsModel):
    """Section 3: the group-relative advantage (GRPO, arXiv:2402.03300)."""

    kind: Literal["grpo", "dr_grpo", "binarised", "chart_rvr", "raw", "permuted"] = "grpo"
    """grpo: (reward - mean) / standard deviation. dr_grpo (arXiv:2503.20783): without the division, so groups that hardly differ
    weigh little. binarised (PyVision's ``grpo_w_anb``): mean and deviation of ``score != 0``, so that successes stay positive even
    when all are equal. chart_rvr: the population's deviation, 1 at least. raw: as grpo, and a lone sample's reward is its
    advantage (verl's original), for ``group_size: 1``. permuted: as grpo, with each group's rewards shuffled over its members
    first: a control from which nothing can be learned."""

    @property
    def rules(self) -> AdvantageSettings:
        """The formula."""
        return ADVANTAGES[self.kind]


class FilteringSettings(SettingsModel):
    """Section 4: oversample, filter, rank (dynamic sampling of DAPO, arXiv:2503.14476). A deliberate bias toward groups that
    teach; it costs generated tokens."""

    filters: Annotated[tuple[FilterSettings, ...], FILTER] = (EqualRewards(),)
    """What keeps a trajectory out of training; of several that refuse it, the first counts. A group may become partial. For
    example ``filters: [{kind: equal_rewards, tolerance: 0.01}, {kind: max_length, tokens: 4096}, {use: "mine:few_turns"}]``;
    ``filters: []`` trains everything. One's own: docs/bring_your_own/filter.md."""
    ranking: Literal["std", "fifo"] = "std"
    """std: groups with the largest reward spread first, ties in request order. fifo: first come, first trained. Where left-over
    groups are carried over, older groups go first, and this orders those that the same version began."""
    groups_per_generation: int | None = Field(None, gt=0)
    """Groups started per generation batch; None: as many as a step needs. Raise it to oversample: ranking then has more to
    choose from. With ``max_staleness`` > 0 it only sizes the budget: no more may start than the bound leaves room for."""
    max_generation_batches: int = Field(4, ge=1)
    """How many generation batches a step may spend on refilling before it trains a smaller batch or stops. Raise it when few
    groups survive the filters."""
    min_fraction: float = Field(0.5, gt=0, le=1)
    """Train a smaller batch when at least this share of the target survived; below it the run stops with the counts. Lower it
    when small steps are better than none."""


class ReplaySettings(SettingsModel):
    """Section 5: ARPO's replay (arXiv:2505.16282) of one stored success into a group that failed throughout."""

    kind: Literal["none", "corrected", "on_policy"] = "none"
    """corrected: replay, with the weight of the policy that sampled it, for tasks so hard that whole groups fail again and again,
    and whose environment gives a result. on_policy: the original, old log-probs recomputed and weight 1; only to reproduce
    ARPO."""

    @property
    def on(self) -> bool:
        """Whether successes are stored and replayed."""
        return self.kind != "none"


class StalenessSettings(SettingsModel):
    """Section 7: how far generation may run ahead of training, in steps."""

    max_staleness: int = Field(0, ge=0)
    """0: synchronous; nothing starts before the weight sync and nothing in flight survives it. Raise it until the trainer no longer
    waits for generation (``timing_s/gen``); more than that only makes samples older. Above 0, whole groups that a step leaves over
    compete again at the next one while they are fresh enough."""
    when_late: Literal["wait", "drop"] = "wait"
    """A group in flight that would be too old at the next step. wait: the step is held until it is there, so every length of
    episode is trained as often as it is played. drop: it is thrown away when it ends; steps are up to 1.6 times as frequent and
    long episodes are trained as little as 0.3 times as often as played (docs/algorithm.md, section 7)."""


class LossSettings(SettingsModel):
    """Section 6: the clipped policy-gradient loss (PPO, arXiv:1707.06347) and its aggregation."""

    clip_low: float = Field(0.2, ge=0, lt=1)
    """How far a token's ratio may fall below 1 before its gradient is cut. Matters only with several updates per step."""
    clip_high: float = Field(0.2, ge=0)
    """Raise it above ``clip_low`` (0.28 in DAPO, arXiv:2503.14476; 0.3 in ARPO) to let rare good tokens grow."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bounds the loss of a negative advantage at dual_clip * |A|. None: off. Lower it when single tokens of bad samples throw
    the policy off."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """How tokens are averaged. token-mean: all tokens of an update alike, so long answers weigh more (DAPO); seq-mean-...:
    all answers alike, their tokens summed or averaged; -norm divides by ``norm_length``, so length has no influence
    (Dr. GRPO, arXiv:2503.20783)."""
    norm_length: int | None = Field(None, gt=0)
    """Required by seq-mean-token-sum-norm (Dr. GRPO as verl has it): the constant that the sum over all tokens is divided by, and
    all it is divided by, so the gradient grows with the trajectories of an update. For TRL's mean over trajectories set the
    length times the trajectories of a full update; a smaller update (filtering) then still weighs less."""
    kl_coef: float = Field(0.0, ge=0)
    """beta of the k3 term against the reference. 0 skips the reference altogether. 0.001 to 0.04 when the text degrades while
    the reward grows."""
    kl_cap: float | None = Field(None, gt=0)
    """Upper bound of the k3 term per token; beyond it there is no gradient. Set it when single tokens own the clipped gradient
    (``actor/kl`` jumps); 10 is verl's low_var_kl. None: only the log-ratio is bounded."""
    entropy_coef: float = Field(0.0, ge=0)
    """A bonus for entropy. 0 unless entropy collapses while rewards are still poor; then small (0.001 to 0.02)."""
    correction: Literal["decoupled", "bypass", "none"] = "decoupled"
    """How the gap between the sampling engine and the trainer is corrected (section 2). decoupled: also right with stale
    trajectories and several updates per step, so keep it; bypass: the engine's log-probs are the old ones; none: only when engine
    and trainer agree to rounding, and as a control."""
    correction_cap: ClassVar[float] = 2.0
    """Upper bound of the decoupled per-token weight exp(old - behaviour): twice the weight of a token that did not drift."""

    @property
    def kl_bound(self) -> float:
        """The k3 term's log-ratio is clamped to so many nats either way: at 10 below the reference a token costs 22,015. verl has
        20 where the term itself is capped."""
        return 10.0 if self.kl_cap is None else 20.0

    @model_validator(mode="after")
    def _norm_length(self) -> LossSettings:
        if (self.aggregation == "seq-mean-token-sum-norm") != (self.norm_length is not None):
            raise ValueError("norm_length goes with aggregation: seq-mean-token-sum-norm, and only with it")
        return self


class UpdateSettings(SettingsModel):
    """Optimizer updates per step: mini-batches are cut at group boundaries, shuffled by the run's seed."""

    epochs: int = Field(1, ge=1)
    """Passes over the trajectories of a step. More use each sample again, further from the policy that drew it."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer updates per epoch. 1 is on-policy; more learn faster per sample, and then ``clip_*`` begins to matter."""
