"""Settings of the algorithm that do nothing beside the others of a run: known from the
configuration, and said before the start. The claim of each sentence is that the gradients are those
of the default, up to rounding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rayloop.core.types import EndReason
from rayloop.grpo.filters import EqualRewards, KeepEndReasons, MaxLength, PositiveNegativeAdvantage
from rayloop.grpo.losses.settings import (
    AdaptiveEntropy,
    Correction,
    DppoLoss,
    LossSettings,
    OwnLoss,
    PpoLoss,
    ReinforceLoss,
)
from rayloop.grpo.settings import AlgorithmSettings, UpdateSettings

CLIPS = ("clip_low", "clip_high", "dual_clip")
SECOND = "Set policy.update.mini_batches to 2 or more"


@dataclass(frozen=True, slots=True)
class Situation:
    """What else decides.

    ``exact``: the engine's log-probs are the trainer's up to rounding. ``refresh_every``: of the
    reference. ``longest``: tokens of a trajectory, None without a bound. ``most_entropy``: of a
    token, in nats.
    """

    exact: bool = False
    refresh_every: int | None = None
    longest: int | None = None
    most_entropy: float = math.inf


def idle(
    loss: LossSettings, algorithm: AlgorithmSettings, update: UpdateSettings, situation: Situation
) -> list[str]:
    """A sentence for each setting that is not the default and changes nothing: where it is, why,
    and what would let it act.
    """
    surrogate = (
        _distilled(loss)
        if algorithm.advantage.kind == "distill"
        else _ratio(loss, update, situation)
    )
    return [
        *surrogate,
        *_correction(loss, update, situation),
        *_terms(loss, algorithm, update, situation),
        *_replay(loss, algorithm),
        *_filters(algorithm, situation),
    ]


def _one(update: UpdateSettings) -> bool:
    return update.epochs * update.mini_batches == 1


def _says(where: str, value: Any, why: str, instead: str) -> str:
    shown = f"{value:g}" if isinstance(value, float) else value
    return f"{where}: {shown} does nothing here: {why}. {instead}"


def _changed(settings: BaseModel, name: str) -> bool:
    """Whether a setting was given, and is not the default."""
    given: bool = getattr(settings, name) != type(settings).model_fields[name].default
    return name in settings.model_fields_set and given


def _ratio(loss: LossSettings, update: UpdateSettings, situation: Situation) -> Iterator[str]:
    """At a ratio of 1 each shipped surrogate has the gradient of ``reinforce``, and no clip holds."""
    if isinstance(loss, OwnLoss):
        return
    to_engine = loss.rule is not None and loss.rule.bypass
    if not _one(update) or (to_engine and not situation.exact):
        if isinstance(loss, ReinforceLoss) and loss.correction == "bypass":
            yield (
                "policy.loss.correction: bypass is none here: kind: reinforce has no ratio, so that"
                " no token is weighed. Leave it out, or take another policy.loss.kind"
            )
        return
    instead = SECOND if to_engine else f"{SECOND}, or policy.loss.correction to bypass"
    if to_engine:
        why = "the ratio to the engine's log-probs is 1 up to rounding with one update a step"
    else:
        why = "the ratio to the trainer's own log-probs is 1 with one update a step"
    kind = getattr(loss, "kind", "ppo")
    if not isinstance(loss, PpoLoss):
        yield _says(
            "policy.loss.kind",
            kind,
            f"{why}, where ppo, gspo, cispo, sapo, dppo and reinforce are one loss",
            instead,
        )
    for name in CLIPS:
        if name in type(loss).model_fields and _changed(loss, name):
            yield _says(
                f"policy.loss.{name}", getattr(loss, name), f"no clip holds, since {why}", instead
            )


def _correction(loss: LossSettings, update: UpdateSettings, situation: Situation) -> Iterator[str]:
    """Weights between log-probs that agree are 1; ``off_policy`` compares the engine's with those
    after earlier updates, too.
    """
    moves = loss.rule is not None and loss.rule.off_policy is not None and not _one(update)
    if (
        situation.exact
        and not moves
        and not isinstance(loss, DppoLoss)
        and _changed(loss, "correction")
    ):
        why = (
            "engine and trainer compute the same log-probs up to rounding, so that each weight is 1"
        )
        instead = (
            "It acts with staleness, with an engine or a dtype that rounds, and on replayed"
            " trajectories"
        )
        shown = "the rule" if isinstance(loss.correction, Correction) else loss.correction
        yield _says("policy.loss.correction", shown, why, instead)


def _terms(
    loss: LossSettings, algorithm: AlgorithmSettings, update: UpdateSettings, situation: Situation
) -> Iterator[str]:
    """The KL and the entropy term."""
    if not loss.uses_kl and _changed(loss, "kl"):
        yield _says(
            "policy.loss.kl",
            loss.kl_term.estimator,
            "policy.loss.kl_coef is 0",
            "Set policy.loss.kl_coef above 0",
        )
    is_current = (
        situation.refresh_every == 1 and _one(update) and not algorithm.staleness.max_staleness
    )
    # k1 has a gradient where the KL is 0: its mean is 0, a single sample's is not.
    flat = loss.kl_term.where == "reward" or loss.kl_term.estimator != "k1"
    if loss.uses_kl and is_current and flat:
        why = (
            "with reference.refresh_every: 1 and one update a step the reference is the policy"
            " itself, and the KL is 0"
        )
        yield _says(
            "policy.loss.kl_coef",
            "the KL term",
            why,
            f"{SECOND}, or refresh the reference less often",
        )
    target = loss.entropy_coef.target if isinstance(loss.entropy_coef, AdaptiveEntropy) else 0.0
    if target > situation.most_entropy:
        why = (
            f"no distribution here has more than {situation.most_entropy:.3g} nats, so that the"
            " coefficient only grows"
        )
        yield (
            f"policy.loss.entropy_coef.target: {target:g} cannot be reached: {why}. Set a target"
            " that the policy can have"
        )


def _replay(loss: LossSettings, algorithm: AlgorithmSettings) -> Iterator[str]:
    """A stored success is weighed by the correction alone."""
    if algorithm.replay.kind == "corrected" and loss.rule is None and not loss.kl_term.unbiased:
        why = "with policy.loss.correction: none no token is weighed, as with on_policy"
        yield _says(
            "algorithm.replay.kind",
            "corrected",
            why,
            "Set policy.loss.correction to decoupled or bypass",
        )
    if _changed(algorithm.staleness, "when_late") and not algorithm.staleness.max_staleness:
        late = algorithm.staleness.when_late
        yield _says(
            "algorithm.staleness.when_late",
            late,
            "with max_staleness: 0 nothing is late",
            "Set max_staleness above 0",
        )


def _filters(algorithm: AlgorithmSettings, situation: Situation) -> Iterator[str]:
    """Filters that keep whatever this run can play."""
    if not _changed(algorithm.filtering, "filters"):
        return
    where = "algorithm.filtering.filters"
    for one in algorithm.filtering.filters:
        if isinstance(one, EqualRewards) and algorithm.group_size == 1:
            yield _says(
                where,
                one.kind,
                "with group_size: 1 no reward has another to be equal to",
                "Leave it out",
            )
        if (
            isinstance(one, MaxLength)
            and situation.longest is not None
            and one.tokens >= situation.longest
        ):
            why = (
                f"an episode has at most {situation.longest} tokens"
                " (environment.episode.max_tokens)"
            )
            yield _says(where, f"{one.kind}, tokens {one.tokens}", why, "Lower it, or leave it out")
        if isinstance(one, KeepEndReasons) and set(EndReason) <= set(one.keep):
            yield _says(
                where, one.kind, "it keeps every end reason", "Name those to keep, or leave it out"
            )
        if (
            isinstance(one, EqualRewards | PositiveNegativeAdvantage)
            and algorithm.advantage.kind == "distill"
        ):
            yield _says(
                where,
                one.kind,
                "distill has no advantages, and learns from each group",
                "Leave it out",
            )


def _distilled(loss: LossSettings) -> Iterator[str]:
    """Without a policy gradient, what shapes it is of no use."""
    why = "advantage.kind: distill has no policy gradient, only the KL"
    if not isinstance(
        loss, PpoLoss | DppoLoss
    ):  # dppo has a correction of its own, which weighs the KL
        yield _says(
            "policy.loss.kind", getattr(loss, "kind", "a loss of your own"), why, "Leave it out"
        )
    for name in (*CLIPS, "top_entropy_quantile"):
        if name in type(loss).model_fields and _changed(loss, name):
            yield _says(f"policy.loss.{name}", getattr(loss, name), why, "Leave it out")
