"""The parts that the variants of Arc Vision's reward share: components, terms and penalties."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayloop.core.groups import Scored
from rayloop.core.protocols import Box
from rayloop.recipes.arc_vision.boxes import area, grounding
from rayloop.recipes.arc_vision.original import step_rewards
from rayloop.recipes.arc_vision.settings import ArcVisionSettings, ArcVisionWeights

_EMPTY_BOX_AREA = 0.01
"""The area of a true box without one; only the published variants score such boxes."""


@dataclass(frozen=True)
class Reading:
    """What a variant reads from an episode and its true box.

    ``calls`` are the lower-case texts of the calls that count, ``written`` the texts of all calls.
    ``closer``: the words of a call that looks closer. ``flag`` names why there is no ``answer``.
    """

    truth: Box
    small: bool
    edge: bool
    written: Sequence[str]
    calls: Sequence[str]
    closer: Sequence[str]
    answer: Box | None
    flag: str
    step: int


def covered(truth: Box) -> float:
    """The area of the true box; ``_EMPTY_BOX_AREA`` when it has none."""
    has_area = truth[0] < truth[2] and truth[1] < truth[3]
    return area(truth) if has_area else _EMPTY_BOX_AREA


def at_edge(truth: Box, margin: float) -> bool:
    """Whether the true box reaches closer than ``margin`` to the image's border."""
    return min(truth[:2]) < margin or max(truth[2:]) > 1 - margin


def base_components(reading: Reading, settings: ArcVisionSettings) -> dict[str, float]:
    """The components that every variant reports, before a term is paid."""
    names = (*reading.closer, settings.waiting, "inspect")
    known_calls = [call for call in reading.calls if _has_word(call, names)]
    return {
        **grounding(reading.answer, reading.truth),
        "tools": float(len(reading.calls)),
        "known_tools": float(len(known_calls)),
        "penalties": 0.0,
        "asked": float(len(reading.written)),
        "small": float(reading.small),
        "edge": float(reading.edge),
        "area": covered(reading.truth),
    }


def published_components(reading: Reading, settings: ArcVisionSettings) -> dict[str, float]:
    """The components with what the original's tools would have paid for the calls."""
    components = base_components(reading, settings)
    if reading.written:
        components["simulated"] = step_rewards(reading.written)
    return components


def _has_word(call: str, words: Iterable[str]) -> bool:
    return any(word in call for word in words)


def tool_term(reading: Reading, overlap: float, settings: ArcVisionSettings) -> float:
    """r_tool at the first step: a share of the overlap after a call, else for restraint."""
    if not reading.calls:
        restrained = not reading.small and overlap > settings.restraint_iou
        return settings.restraint if restrained else 0.0
    shares = settings.shares
    if reading.small:
        share = shares.small
    elif reading.edge:
        share = shares.edge
    else:
        share = shares.other
    return min(shares.most, overlap * share)


def look_penalties(
    reading: Reading, overlap: float, settings: ArcVisionSettings
) -> dict[str, float]:
    """The penalties for too few and too many looks that apply: flag -> cost."""
    costs = settings.penalties
    penalties = {}
    if reading.small and not reading.calls and overlap < costs.missed_iou:
        penalties["missed_tool"] = costs.missed
    if not reading.small and not reading.edge and len(reading.calls) > 1:
        penalties["unneeded_tools"] = costs.unneeded
    return penalties


def all_penalties(
    reading: Reading, overlap: float, settings: ArcVisionSettings
) -> dict[str, float]:
    """All penalties that apply: flag -> cost."""
    penalties = look_penalties(reading, overlap, settings)
    waited = any(settings.waiting in call for call in reading.calls)
    looked_closer = any(_has_word(call, reading.closer) for call in reading.calls)
    if reading.small and waited and not looked_closer:
        penalties["wrong_tool"] = settings.penalties.wrong
    if len(reading.calls) > settings.max_tools:
        penalties["excessive_tools"] = settings.penalties.excessive
    return penalties


def reward_terms(
    reading: Reading,
    overlap: float,
    tool: float,
    penalties: Mapping[str, float],
    settings: ArcVisionSettings,
) -> dict[str, float]:
    """The three terms, with ``tool`` decayed, and the number of penalties."""
    decay = settings.decay
    if decay.steps:
        tool *= max(decay.least, 1 - reading.step / decay.steps)
    return {
        "r_task": overlap,
        "r_tool": tool,
        "r_gate": 0.0 - sum(penalties.values()),
        "penalties": float(len(penalties)),
    }


def weighted_sum(terms: Mapping[str, float], weights: ArcVisionWeights) -> float:
    """The reward before the completion penalty."""
    return (
        weights.task * terms["r_task"]
        + weights.tool * terms["r_tool"]
        + weights.gate * terms["r_gate"]
    )


def scored(
    value: float,
    components: Mapping[str, float],
    penalties: Iterable[str],
    reading: Reading,
    settings: ArcVisionSettings,
) -> Scored:
    """``value`` less the completion penalty, with the flags of the episode."""
    flags = list(penalties)
    if reading.answer is None:
        flags.append(reading.flag)
        cost = _completion_cost(settings, reading.step) if reading.written else 0.0
        if cost:
            flags.append("incomplete")
        value -= cost
    return Scored(value, components, tuple(flags))


def tool_only(
    components: Mapping[str, float],
    reading: Reading,
    settings: ArcVisionSettings,
    *,
    default: float,
) -> Scored:
    """The reward of calls without anything that looks like an answer.

    ``default`` is paid when the settings name no ``tool_only``.
    """
    value = default if settings.tool_only is None else settings.tool_only
    if not reading.small and not reading.edge:
        value = 0.0
    terms = {"r_task": 0.0, "r_tool": value, "r_gate": 0.0}
    cost = _completion_cost(settings, reading.step)
    flags = ("tool_only", "incomplete") if cost else ("tool_only",)
    # A box that a published parser reads without the marks of an answer is not paid.
    no_answer = grounding(None, reading.truth)
    return Scored(value - cost, {**components, **no_answer, **terms}, flags)


def _completion_cost(settings: ArcVisionSettings, step: int) -> float:
    """The penalty for calls without an answer at this step."""
    return settings.completion.penalty if step > settings.completion.after else 0.0
