"""Settings of the policy-gradient loss, a class for each kind (docs/algorithm.md, section 6).

No torch.
"""

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, Tag, model_validator

from rayloop.config.settings import CUSTOM, Component, Role, SettingsModel, by_kind, takes

Aggregation = (
    Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "prompt-mean"]
    | PositiveFloat
)
Estimator = Literal["k1", "k2", "k3", "k3+", "low_var_kl"]


class KlTerm(SettingsModel):
    """``kl: {estimator, in, unbiased}``."""

    estimator: Estimator = "k3"
    """The estimator of ``policy.loss.kl``, where one of the two keys below is set too.

    Why a key: RLHF's reward (``in: reward``) needs ``k1``, which has no gradient in the loss.
    """
    where: Literal["loss", "reward"] = Field("loss", alias="in")
    """Where the term is: in the loss, or in the reward (RLHF, arXiv:1909.08593).

    reward: minus the coefficient times the estimate is a reward of each token, which the advantages
    of the tokens up to it share. Why a key: a run that repeats PPO-style RLHF, or verl's
    ``use_kl_in_reward``, has it in the reward.
    """
    unbiased: bool = False
    """Times ``exp(logprobs - rollout_logprobs)``: right for tokens that another policy sampled.

    DeepSeek-V3.2, arXiv:2512.02556, equation 7. Why a key: true with stale trajectories, where the
    plain estimate is that of the policy which sampled them.
    """


class AdaptiveKl(SettingsModel):
    """``kl_coef: {start, target, horizon}`` (arXiv:1909.08593, equation 4).

    After a step of n trajectories the coefficient is multiplied by ``1 + n / horizon * error``,
    ``error = kl / target - 1`` clipped to +-0.2; both in nats a token.
    """

    start: PositiveFloat
    """The coefficient of the first step; later ones depend on ``target``.

    Why a key: a task whose rewards are small against the KL begins lower, or nothing is learned
    before the coefficient has fallen.
    """
    target: PositiveFloat
    """The KL to the reference that the coefficient keeps up, in nats a token.

    Why a key: it is what the user allows the policy to change, more for a new answer format than
    for a style to be kept.
    """
    horizon: PositiveFloat = 10_000.0
    """Trajectories over which the coefficient follows; the default is the paper's.

    Why a key: steps of many trajectories must raise it, or the coefficient falls to 0 at once; a
    run of a few thousand trajectories lowers it to adapt at all.
    """


class AdaptiveEntropy(SettingsModel):
    """``entropy_coef: {target}`` (Skywork-OR1, arXiv:2505.22312, section 4.2).

    After each step the coefficient, 0 at first, grows by ``step`` when the entropy is below
    ``target`` nats a token, else it falls, to 0 at least, and does not apply.
    """

    target: PositiveFloat
    """The entropy below which the bonus applies, in nats a token; Skywork-OR1 has 0.2.

    Why a key: entropy depends on model and task: coordinates of a click vary less than a text.
    """
    step: ClassVar[float] = 0.005
    """Change of the coefficient after a step, as in the paper.

    The coefficient finds its value by such steps, so another one only comes there later or sooner.
    """


class Perception(SettingsModel):
    """``perception: {coef, entropy}`` (PAPO, arXiv:2507.06448).

    The policy is driven away from what it says when patches of its pictures are black.
    """

    coef: PositiveFloat = 0.01
    """Coefficient (gamma) of the KL between the policies with whole and with masked pictures.

    Why a key: the authors have 0.01, and 0.02 beside a KL term to the reference.
    """
    entropy: NonNegativeFloat = 0.03
    """Coefficient (eta) of the entropy, which the loss lowers.

    The KL can also be raised by answers that say nothing. Why a key: the authors have 0.03, 0.05
    for 7B and 0 beside a KL term of 3B.
    """


class Correction(SettingsModel):
    """``correction: {level, action, low, high, veto, off_policy, bypass}``.

    A token's weight is ``exp(old_logprobs - rollout_logprobs)`` of the token, or the product
    (sequence) or the geometric mean (geometric) of these over its trajectory.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    """Over which log-probs a weight is taken: a token's, or all of its trajectory.

    Why a key: sequence is the exact importance weight of short answers; geometric, for long ones,
    does not explode with the length.
    """
    action: Literal["truncate", "mask"] = "truncate"
    """What happens to a weight outside of [low, high]: truncate clamps it; mask makes it 0.

    Why a key: IcePop and other published rules mask; with a mixture-of-experts model, tokens far
    off are often wrong rather than rare.
    """
    low: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The least weight, 1 at most; 0 bounds nothing from below.

    Why a key: published rules that mask have a lower bound, such as 0.5 of IcePop.
    """
    high: Annotated[float, Field(ge=1, allow_inf_nan=True)] = 2.0
    """The largest weight, 1 at least; ``.inf`` bounds nothing from above.

    Why a key: IcePop masks above 5, and the product over a trajectory varies more than one token's
    weight, so that it has a higher bound.
    """
    veto: tuple[float, Annotated[float, Field(allow_inf_nan=True)]] | None = None
    """``[low, high]``: a trajectory with one token's weight outside of it counts nothing.

    Why a key: an engine with a quantised cache now and then samples a token that the trainer
    thinks impossible; ``[1.0e-4, 100]`` leaves such trajectories out.
    """
    off_policy: NonNegativeFloat | None = None
    """Most nats by which a trajectory with a negative advantage may have become less likely.

    In the mean of its tokens; beyond it the trajectory counts nothing (DeepSeek-V3.2,
    arXiv:2512.02556, equation 9). Why a key: for runs with several updates a step or stale
    trajectories, whose failures would push the policy on when it has left them already.
    """
    bypass: bool = False
    """The ratio is to the engine's log-probs, and the rule only masks.

    Why a key: ``correction: bypass`` has no bounds; this one does, as verl's bypass mode with
    rejection.
    """

    @model_validator(mode="after")
    def _agrees(self) -> Self:
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
        return self


BYPASS = Correction(action="mask", high=math.inf, bypass=True)


class LossSettings(SettingsModel):
    """The settings that every loss has.

    They are aggregation, KL and entropy terms, and the correction for the engine's log-probs.
    """

    aggregation: Aggregation = "token-mean"
    """How tokens are averaged.

    token-mean: each token of an update has the same weight, so long answers weigh more (DAPO);
    seq-mean-...: each answer has the same weight, its tokens summed or averaged; prompt-mean: each
    group has the same weight, its tokens averaged. A number: the sum over all tokens is divided by
    it, so length has no influence (Dr. GRPO, arXiv:2503.20783; verl's seq-mean-token-sum-norm), and
    the gradient grows with the trajectories of an update. For TRL's mean set the length times the
    trajectories of a full update.
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
    """Share of an update's tokens that have a policy gradient, chosen by the highest entropy.

    Below 1 each update begins with one more forward pass, which finds the entropy from which tokens
    count. Why a key: arXiv:2506.01939 trains on the fifth of the tokens with the most entropy: 0.2.
    """
    perception: Perception | None = None
    """The masked pictures of PAPO, as ``{}`` with the authors' numbers.

    The log-probs with masked pictures cost one more forward pass a step. Why a key: for tasks in
    which a policy learns to answer without looking.
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
        lowers_it = self.perception is not None and self.perception.entropy > 0
        return self.entropy_coef != 0 or lowers_it

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
