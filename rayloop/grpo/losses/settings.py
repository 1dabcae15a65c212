"""Settings of the policy-gradient loss, a class for each kind (docs/algorithm.md, section 6).

No torch.
"""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, Tag, model_validator
from pydantic.dataclasses import dataclass

from rayloop.config.settings import CUSTOM, Component, Role, SettingsModel, by_kind, takes

VALUE = ConfigDict(extra="forbid", allow_inf_nan=False)
Aggregation = (
    Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "prompt-mean"]
    | PositiveFloat
)
Estimator = Literal["k1", "k2", "k3", "k3+", "low_var_kl"]


@dataclass(frozen=True, config=VALUE)
class KlTerm:
    """``kl: {estimator, in, unbiased}``.

    ``in: reward``: minus the coefficient times the estimate is a reward of each token, which the
    advantages of the tokens up to it share (RLHF, arXiv:1909.08593). ``unbiased``: times
    ``exp(logprobs - rollout_logprobs)``, so that the estimate holds for tokens that another policy
    sampled (DeepSeek-V3.2, arXiv:2512.02556, equation 7).
    """

    estimator: Estimator = "k3"
    where: Annotated[Literal["loss", "reward"], Field(alias="in")] = "loss"
    unbiased: bool = False


@dataclass(frozen=True, config=VALUE)
class AdaptiveKl:
    """``kl_coef: {start, target, horizon}`` (arXiv:1909.08593, equation 4).

    After a step of n trajectories the coefficient is multiplied by ``1 + n / horizon * error``,
    ``error = kl / target - 1`` clipped to +-0.2; both in nats a token.
    """

    start: PositiveFloat
    target: PositiveFloat
    horizon: PositiveFloat = 10_000.0


@dataclass(frozen=True, config=VALUE)
class AdaptiveEntropy:
    """``entropy_coef: {target, step, start}`` (Skywork-OR1, arXiv:2505.22312, section 4.2).

    After each step the coefficient grows by ``step`` when the entropy is below ``target`` nats a
    token, else it falls, to 0 at least, and does not apply.
    """

    target: PositiveFloat
    step: PositiveFloat = 0.005
    start: NonNegativeFloat = 0.0


@dataclass(frozen=True, config=VALUE)
class Correction:
    """``correction: {level, action, low, high, veto, off_policy, bypass}``.

    A token's weight is ``exp(old_logprobs - rollout_logprobs)`` of the token, or the product
    (sequence) or the geometric mean (geometric) of these over its trajectory. truncate: clamped to
    [low, high]; mask: 0 outside. ``veto: [low, high]``: a trajectory with one token's weight
    outside counts nothing. ``off_policy: delta``: neither does one with a negative advantage whose
    tokens have become less likely by more than delta nats in the mean (DeepSeek-V3.2,
    arXiv:2512.02556, equation 9). ``bypass``: the ratio is to the engine's log-probs, and the rule
    only masks.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    action: Literal["truncate", "mask"] = "truncate"
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    high: Annotated[float, Field(ge=1, allow_inf_nan=True)] = 2.0
    veto: tuple[float, Annotated[float, Field(allow_inf_nan=True)]] | None = None
    off_policy: NonNegativeFloat | None = None
    bypass: bool = False

    def __post_init__(self) -> None:
        if self.bypass and self.action == "truncate":
            raise ValueError(
                "bypass: true has weights of 1, which action: truncate cannot bound; set action:"
                " mask"
            )
        if self.veto is not None and not 0 <= self.veto[0] < 1 < self.veto[1]:
            raise ValueError(
                f"veto: {list(self.veto)} must hold 1, the weight without drift; [1.0e-4, 100] is"
                " usual"
            )


BYPASS = Correction(action="mask", high=math.inf, bypass=True)


class LossSettings(SettingsModel):
    """The settings that every loss has.

    They are aggregation, KL and entropy terms, and the correction for the engine's log-probs.
    """

    aggregation: Aggregation = "token-mean"
    """How tokens are averaged.

    token-mean: all tokens of an update alike, so long answers weigh more (DAPO); seq-mean-...: all
    answers alike, their tokens summed or averaged; prompt-mean: all groups alike, their tokens
    averaged. A number: the sum over all tokens is divided by it, so length has no influence (Dr.
    GRPO, arXiv:2503.20783; verl's seq-mean-token-sum-norm), and the gradient grows with the
    trajectories of an update. For TRL's mean set the length times the trajectories of a full
    update.
    """
    kl_coef: float | AdaptiveKl = Field(0.0)
    """beta of the KL term against the reference.

    0 skips the reference altogether. 0.001 to 0.04 when the text degrades while the reward grows; 1
    to distil. ``{start: 0.01, target: 0.05}`` adapts it.
    """
    kl: Estimator | KlTerm = "k3"
    """The estimator of the KL term (joschu.net/blog/kl-approx.html); d is logprobs - ref_logprobs.

    k3 (GRPO): its gradient is that of the forward KL. k2, d^2 / 2, and k3+, the value of k3: their
    gradient is that of the reverse KL, so use one of them to distil. k1, d: no gradient, for the
    reward. low_var_kl: k3, at most 10 (verl). ``{estimator: k1, in: reward}`` puts it into the
    advantages; ``{estimator: k3, unbiased: true}`` is right for stale tokens too.
    """
    entropy_coef: float | AdaptiveEntropy = Field(0.0)
    """A bonus for entropy: 0 unless entropy collapses while rewards are poor, then 0.001 to 0.02.

    ``{target: 0.2}`` adapts it.
    """
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Share of an update's tokens, those with the most entropy, that have a policy gradient.

    arXiv:2506.01939 has 0.2. Below 1 each update begins with one more forward pass, which finds the
    entropy from which tokens count.
    """
    correction: Literal["decoupled", "bypass", "none"] | Correction = "decoupled"
    """How the gap between the sampling engine and the trainer is corrected (section 2).

    decoupled: each token's weight is at most 2; also right with stale trajectories and several
    updates per step, so keep it; bypass: the engine's log-probs are the old ones; none: only when
    engine and trainer agree to rounding, and as a control. ``{level: sequence, action: mask, high:
    2}`` and others: docs/algorithm.md.
    """

    @property
    def uses_kl(self) -> bool:
        """Whether the reference's log-probs are needed."""
        return self.kl_coef != 0

    @property
    def uses_entropy(self) -> bool:
        """Whether the entropy has a gradient."""
        return self.entropy_coef != 0

    @property
    def looks_at_trajectories(self) -> bool:
        """Whether a token's loss depends on the other tokens of its trajectory."""
        rule = self.rule
        return rule is not None and (
            rule.level != "token" or rule.veto is not None or rule.off_policy is not None
        )

    @property
    def adapts(self) -> bool:
        """Whether a coefficient depends on earlier steps."""
        return isinstance(self.kl_coef, AdaptiveKl) or isinstance(
            self.entropy_coef, AdaptiveEntropy
        )

    @property
    def kl_term(self) -> KlTerm:
        """``kl``, spelled out."""
        return self.kl if isinstance(self.kl, KlTerm) else KlTerm(estimator=self.kl)

    @property
    def rule(self) -> Correction | None:
        """``correction``, spelled out.

        None: every weight is 1 and the ratio is to the trainer's log-probs.
        """
        if isinstance(self.correction, Correction):
            return self.correction
        return {"decoupled": Correction(), "bypass": BYPASS, "none": None}[self.correction]

    @model_validator(mode="after")
    def _terms(self) -> Self:
        for name in ("kl_coef", "entropy_coef"):
            value = getattr(self, name)
            if isinstance(value, float) and value < 0:
                raise ValueError(f"{name} is {value:g}; it must be 0 or more")
        if self.kl_term.where == "reward" and self.kl_term.unbiased:
            raise ValueError(
                "kl: unbiased is about the term in the loss; leave it out with in: reward"
            )
        if self.kl_term.unbiased and self.kl_term.estimator in ("k2", "k3+"):
            raise ValueError(
                "kl: unbiased goes with estimator: k1 or k3: its weight has a gradient too, and"
                f" with {self.kl_term.estimator} the two are not the KL's"
            )
        return self


class PpoLoss(LossSettings):
    """PPO's clipped loss (arXiv:1707.06347, equation 7).

    The clip above 1 is separate (DAPO, arXiv:2503.14476).
    """

    kind: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """How far a token's ratio may fall below 1 before its gradient is cut.

    Matters only with several updates per step.
    """
    clip_high: float = Field(0.2, ge=0)
    """How far a token's ratio may rise above 1 before its gradient is cut.

    Raise it above ``clip_low`` (0.28 in DAPO, arXiv:2503.14476; 0.3 in ARPO) to let rare good
    tokens grow.
    """
    dual_clip: float | None = Field(3.0, gt=1)
    """Bounds the loss of a negative advantage at dual_clip * |A|.

    None: off. Lower it when single tokens throw the policy off.
    """


class GspoLoss(LossSettings):
    """GSPO (arXiv:2507.18071, equation 5): PPO's clip on the ratio of the whole trajectory.

    That ratio is the geometric mean of its tokens' ratios. The gradient is spread over the tokens
    (GSPO-token, equation 14).
    """

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """How far a trajectory's ratio may fall below 1, as in the paper.

    Means over many tokens hardly move.
    """
    clip_high: float = Field(4e-4, ge=0)
    """How far a trajectory's ratio may rise above 1, as in the paper."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """As for the other losses; the paper averages trajectories."""

    @property
    def looks_at_trajectories(self) -> bool:
        """Always: the ratio is the trajectory's."""
        return True


class CispoLoss(LossSettings):
    """CISPO (MiniMax-M1, arXiv:2506.13585, equation 4): the clipped ratio is a constant weight.

    No token loses its gradient.
    """

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """How far below 1 the weight may fall. 1: no bound, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """How far above 1 it may rise: 5 is the largest weight (ScaleRL, arXiv:2510.13786)."""


class SapoLoss(LossSettings):
    """SAPO (arXiv:2511.20347, equation 5): a smooth gate on the ratio in place of the clip."""

    kind: Literal["sapo"] = "sapo"
    temperatures: ClassVar[tuple[float, float]] = (1.0, 1.05)
    """How fast the gate closes away from a ratio of 1, as in the paper.

    The first value is for advantages above 0, the second for the others.
    """
    aggregation: Aggregation = "seq-mean-token-mean"
    """As for the other losses; the paper averages trajectories."""


class DppoLoss(LossSettings):
    """DPPO with the binary total variation (arXiv:2602.04879).

    A token counts while its probability stays near the engine's.
    """

    kind: Literal["dppo"] = "dppo"
    clip_low: float = Field(0.15, ge=0)
    """How far a probability may fall below the engine's for a negative advantage, as in the paper.

    verl and prime-rl have 0.2.
    """
    clip_high: float = Field(0.15, ge=0)
    """How far it may rise above for a positive one."""
    correction: Literal["bypass"] = "bypass"
    """The ratio is to the engine's log-probs; no other correction goes with it."""


class ReinforceLoss(LossSettings):
    """REINFORCE: minus advantage times log-prob, weighed by the correction alone.

    It is for one update a step.
    """

    kind: Literal["reinforce"] = "reinforce"


class CustomLoss(LossSettings, Component):
    """A custom surrogate, used together with the other terms.

    It is a function of ``rayloop.grpo.losses.surrogates.LossInputs``, or a class with a method
    ``loss`` of one. It returns the loss of each token [N], or ``LossOutputs``.
    """

    @property
    def looks_at_trajectories(self) -> bool:
        """It may."""
        return True


LOSS = Role(
    "loss",
    ("loss",),
    takes("inputs", "loss", "Write loss(inputs), which returns the loss of each token [N]"),
)

LossChoice = Annotated[
    Annotated[PpoLoss, Tag("ppo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[DppoLoss, Tag("dppo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[CustomLoss, Tag(CUSTOM)],
    by_kind("ppo"),
]
