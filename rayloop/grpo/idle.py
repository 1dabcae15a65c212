"""Finds settings of the algorithm that do nothing together with the others of a run.

They are known from the configuration, and are reported before the start. Each sentence claims that
the gradients equal the default's, up to rounding.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rayloop.core.types import EndReason
from rayloop.grpo.filters import EqualRewards, KeepEndReasons, MaxLength, PositiveNegativeAdvantage
from rayloop.grpo.losses.settings import (
    AdaptiveEntropy,
    Correction,
    CustomLoss,
    DppoLoss,
    LossSettings,
    PpoLoss,
    ReinforceLoss,
)
from rayloop.grpo.settings import AlgorithmSettings, UpdateSettings

CLIPS = ("clip_low", "clip_high", "dual_clip")
SECOND_UPDATE = "Set policy.update.mini_batches to 2 or more"


@dataclass(frozen=True)
class Situation:
    """The facts outside the algorithm's settings on which their effect depends."""

    exact: bool = False
    """The engine's log-probs are the trainer's up to rounding."""
    refresh_every: int | None = None
    """The number of steps after which the reference is refreshed."""
    longest: int | None = None
    """Tokens of the longest possible trajectory; None: without a bound."""
    most_entropy: float = math.inf
    """Largest possible entropy of a token, in nats."""


def idle(
    loss: LossSettings, algorithm: AlgorithmSettings, update: UpdateSettings, situation: Situation
) -> list[str]:
    """A sentence for each setting that is not the default and changes nothing.

    It says where the setting is, why it does nothing, and what would let it act.
    """
    if algorithm.advantage.kind == "distill":
        surrogate = _distilled(loss)
    else:
        surrogate = _ratio(loss, update, situation)
    return [
        *surrogate,
        *_correction(loss, update, situation),
        *_terms(loss, algorithm, update, situation),
        *_replay(loss, algorithm),
        *_filters(algorithm, situation),
    ]


def _has_one_update(update: UpdateSettings) -> bool:
    return update.epochs * update.mini_batches == 1


def _sentence(setting: str, value: Any, reason: str, advice: str) -> str:
    text = f"{value:g}" if isinstance(value, float) else value
    return f"{setting}: {text} does nothing here: {reason}. {advice}"


def _changed(settings: BaseModel, name: str) -> bool:
    """Whether the configuration has a setting, and with another value than the default."""
    differs: bool = getattr(settings, name) != type(settings).model_fields[name].default
    return name in settings.model_fields_set and differs


def _changed_loss_settings(loss: LossSettings, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The (path, value) of each setting that this loss has and the configuration changes."""
    for name in names:
        if name in type(loss).model_fields and _changed(loss, name):
            yield f"policy.loss.{name}", getattr(loss, name)


def _ratio(loss: LossSettings, update: UpdateSettings, situation: Situation) -> Iterator[str]:
    """Settings without effect at a ratio of 1.

    There each shipped surrogate has the gradient of ``reinforce``, and no clip holds.
    """
    if isinstance(loss, CustomLoss):
        return
    to_engine = loss.rule is not None and loss.rule.bypass
    if not _has_one_update(update) or (to_engine and not situation.exact):
        if isinstance(loss, ReinforceLoss) and loss.correction == "bypass":
            yield (
                "policy.loss.correction: bypass is the same as none here: kind: reinforce has no"
                " ratio, and bypass weighs no token. Leave it out to have tokens weighed, or take"
                " another policy.loss.kind"
            )
        return
    if to_engine:
        reason = "the ratio to the engine's log-probs is 1 up to rounding with one update a step"
        advice = SECOND_UPDATE
    else:
        reason = "the ratio to the trainer's own log-probs is 1 with one update a step"
        advice = f"{SECOND_UPDATE}, or policy.loss.correction to bypass"
    if not isinstance(loss, PpoLoss):
        yield _sentence(
            "policy.loss.kind",
            getattr(loss, "kind", "ppo"),
            f"{reason}, where ppo, gspo, cispo, sapo, dppo and reinforce are one loss",
            advice,
        )
    for setting, value in _changed_loss_settings(loss, CLIPS):
        yield _sentence(setting, value, f"no clip holds, since {reason}", advice)


def _correction(loss: LossSettings, update: UpdateSettings, situation: Situation) -> Iterator[str]:
    """Corrections without effect: the weights between log-probs that agree are 1.

    ``off_policy`` also compares the engine's log-probs with those after earlier updates.
    """
    if not situation.exact or isinstance(loss, DppoLoss) or not _changed(loss, "correction"):
        return
    compares_updates = loss.rule is not None and loss.rule.off_policy is not None
    if compares_updates and not _has_one_update(update):
        return
    yield _sentence(
        "policy.loss.correction",
        "the rule" if isinstance(loss.correction, Correction) else loss.correction,
        "engine and trainer compute the same log-probs up to rounding, so that each weight is 1",
        "It acts with staleness, with an engine or a dtype that rounds, and on replayed"
        " trajectories",
    )


def _terms(
    loss: LossSettings, algorithm: AlgorithmSettings, update: UpdateSettings, situation: Situation
) -> Iterator[str]:
    """The KL and the entropy term."""
    if not loss.uses_kl and _changed(loss, "kl"):
        yield _sentence(
            "policy.loss.kl",
            loss.kl_term.estimator,
            "policy.loss.kl_coef is 0",
            "Set policy.loss.kl_coef above 0",
        )
    reference_is_policy = (
        situation.refresh_every == 1 and _has_one_update(update) and algorithm.synchronous
    )
    # k1 has a gradient where the KL is 0: its mean is 0, but not that of a single sample.
    is_flat_at_zero = loss.kl_term.where == "reward" or loss.kl_term.estimator != "k1"
    if loss.uses_kl and reference_is_policy and is_flat_at_zero:
        yield _sentence(
            "policy.loss.kl_coef",
            "the KL term",
            "with reference.refresh_every: 1 and one update a step the reference is the policy"
            " itself, and the KL is 0",
            f"{SECOND_UPDATE}, or refresh the reference less often",
        )
    entropy = loss.entropy_coef
    if isinstance(entropy, AdaptiveEntropy) and entropy.target > situation.most_entropy:
        yield (
            f"policy.loss.entropy_coef.target: {entropy.target:g} cannot be reached: no"
            f" distribution here has more than {situation.most_entropy:.3g} nats, so that the"
            " coefficient only grows. Set a target that the policy can have"
        )


def _replay(loss: LossSettings, algorithm: AlgorithmSettings) -> Iterator[str]:
    """A stored success is weighed by the correction alone."""
    if algorithm.replay.kind == "corrected" and loss.rule is None and not loss.kl_term.unbiased:
        yield _sentence(
            "algorithm.replay.kind",
            "corrected",
            "with policy.loss.correction: none no token is weighed, as with on_policy",
            "Set policy.loss.correction to decoupled or bypass",
        )
    if _changed(algorithm.staleness, "when_late") and algorithm.synchronous:
        yield _sentence(
            "algorithm.staleness.when_late",
            algorithm.staleness.when_late,
            "with max_staleness: 0 nothing is late",
            "Set max_staleness above 0",
        )


def _filters(algorithm: AlgorithmSettings, situation: Situation) -> Iterator[str]:
    """Filters that keep every trajectory that this run can play."""
    if not _changed(algorithm.filtering, "filters"):
        return
    setting = "algorithm.filtering.filters"
    is_distilled = algorithm.advantage.kind == "distill"
    for item in algorithm.filtering.filters:
        if isinstance(item, EqualRewards) and algorithm.group_size == 1:
            reason = "with group_size: 1 no reward has another to be equal to"
            yield _sentence(setting, item.kind, reason, "Leave it out")
        if isinstance(item, MaxLength) and _holds_every_episode(item, situation):
            yield _sentence(
                setting,
                f"{item.kind}, tokens {item.tokens}",
                f"an episode has at most {situation.longest} tokens"
                " (environment.episode.max_tokens)",
                "Lower it, or leave it out",
            )
        if isinstance(item, KeepEndReasons) and set(EndReason) <= set(item.keep):
            advice = "Name those to keep, or leave it out"
            yield _sentence(setting, item.kind, "it keeps every end reason", advice)
        if isinstance(item, EqualRewards | PositiveNegativeAdvantage) and is_distilled:
            reason = "distill has no advantages, and learns from each group"
            yield _sentence(setting, item.kind, reason, "Leave it out")


def _holds_every_episode(limit: MaxLength, situation: Situation) -> bool:
    return situation.longest is not None and limit.tokens >= situation.longest


def _distilled(loss: LossSettings) -> Iterator[str]:
    """Without a policy gradient, the settings that shape it have no effect."""
    reason = "advantage.kind: distill has no policy gradient, only the KL"
    # The correction of dppo weighs the KL.
    if not isinstance(loss, PpoLoss | DppoLoss):
        kind = getattr(loss, "kind", "a custom loss")
        yield _sentence("policy.loss.kind", kind, reason, "Leave it out")
    for setting, value in _changed_loss_settings(loss, (*CLIPS, "top_entropy_quantile")):
        yield _sentence(setting, value, reason, "Leave it out")
