"""The metrics of a step that follow from its groups alone.

They are rewards, lengths, how episodes ended and where trajectories went.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import mean, pstdev
from typing import Any

from rayloop.core.groups import Group, Member, Scored
from rayloop.core.types import EndReason, Summary
from rayloop.grpo.filters import equality, reason_of_no_gradient
from rayloop.measure.intervals import calibration_error


@dataclass(frozen=True)
class Collected:
    """The ``groups`` that a step trains (in request order), and events since the last step.

    ``ended_groups``: all that ended, after the filters. ``dropped``: stale and surplus members, by
    ``state/source``. ``acceptance``: the average share that survives the filters. ``replay``:
    ``ReplayBuffer.stats``, empty when off.
    """

    groups: tuple[Group, ...]
    ended_groups: tuple[Group, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    acceptance: float = 1.0
    replay: Mapping[str, Any] = field(default_factory=dict)


def step_metrics(collected: Collected, target: int) -> dict[str, float]:
    """The metrics of the groups that ended, and of the trajectories that the step trains.

    ``target``: trajectories of a full step.
    """
    members = list(chain(*(group.members for group in collected.ended_groups)))
    metrics: dict[str, float] = {
        **_counts(collected, members, target),
        **_reward_metrics(members),
        **_equal_groups(collected.ended_groups),
        **_by_source("trained", chain(*(group.kept for group in collected.groups))),
        **_by_source("played", members),
        **_misjudged(chain(*(group.scored for group in collected.groups))),
        **{name: float(count) for name, count in collected.dropped.items()},
    }
    if collected.replay:
        metrics["replay/stored"] = float(collected.replay["stored"])
        metrics["replay/tasks"] = float(collected.replay["tasks"])

    summaries = [member.summary for member in members if member.summary.length]
    if summaries:
        metrics |= _lengths_and_times(summaries)
        metrics |= _images_sent(summaries)
        metrics |= _end_reasons(summaries)

    statuses: Counter[str] = Counter()
    for member in members:
        if member.status is not None:
            statuses[f"{member.status.state}/{member.status.reason}"] += 1
    return metrics | {name: float(count) for name, count in statuses.items()}


def _counts(collected: Collected, members: Sequence[Member], target: int) -> dict[str, float]:
    """How many groups and trajectories ended, and how many of them the step trains."""
    trained = sum(len(group.kept) for group in collected.groups)
    replayed = sum(group.replay_of is not None for group in collected.groups)
    return {
        "rollout/groups": float(len(collected.ended_groups)),
        "rollout/trajectories": float(len(members)),
        "rollout/trained": float(trained),
        "rollout/trained_share": trained / target,
        "rollout/replayed": float(replayed),
        "rollout/acceptance": collected.acceptance,
    }


def _lengths_and_times(summaries: Sequence[Summary]) -> dict[str, float]:
    """Tokens, turns and seconds of the trajectories that were played."""
    sampled_tokens = [summary.sampled_tokens for summary in summaries]
    prompt_tokens = [summary.length - summary.sampled_tokens for summary in summaries]
    seconds = [summary.seconds for summary in summaries]
    return {
        "response_length/mean": mean(sampled_tokens),
        "response_length/max": float(max(sampled_tokens)),
        "response_length/clip_ratio": mean(float(summary.cut) for summary in summaries),
        "prompt_length/mean": mean(prompt_tokens),
        "rollout/tokens": float(sum(sampled_tokens)),
        "rollout/turns/mean": mean(summary.turns for summary in summaries),
        "rollout/seconds/mean": mean(seconds),
        "rollout/seconds/max": max(seconds),
        "rollout/seconds/engine": mean(_seconds_in(s, "generate") for s in summaries),
        "rollout/seconds/environment": mean(_seconds_in(s, "reset", "step") for s in summaries),
    }


def _images_sent(summaries: Sequence[Summary]) -> dict[str, float]:
    """Images that were sent to engines; empty for trajectories without images."""
    if not any(summary.images for summary in summaries):
        return {}
    return {
        "rollout/images_sent": float(sum(summary.sent.images for summary in summaries)),
        "rollout/images_sent_again": float(sum(summary.sent.again for summary in summaries)),
        "rollout/image_bytes_sent": float(sum(summary.sent.bytes for summary in summaries)),
    }


def _end_reasons(summaries: Sequence[Summary]) -> dict[str, float]:
    """Shares of trajectories by their end reason, and of those paid at their last turn."""
    # Always present, so that its curve has a 0 where no episode was completed.
    reasons = Counter({str(EndReason.DONE): 0})
    reasons.update(str(summary.end_reason) for summary in summaries)
    shares = {f"end_reason/{name}": count / len(summaries) for name, count in reasons.items()}
    paid = 0
    for summary in summaries:
        if summary.end_reason is EndReason.MAX_TURNS and (summary.env_result or 0.0) > 0:
            paid += 1
    return {**shares, "rollout/paid_at_max_turns": paid / len(summaries)}


def _equal_groups(ended_groups: Sequence[Group]) -> dict[str, float]:
    """Shares of groups without a gradient, and of groups with only right or only wrong answers.

    Over groups with two fresh scored members at least, whatever the filters made of them.
    """
    contrasts: list[str] = []
    equalities: list[str] = []
    for group in ended_groups:
        scored = [member for member in group.members if isinstance(member.outcome, Scored)]
        rewards = [member.reward for member in scored if not member.replayed]
        if len(rewards) > 1:
            with_credit = [member for member in scored if member.credit is not None]
            contrasts.append(reason_of_no_gradient(with_credit))
            equalities.append(equality(rewards))
    if not equalities:
        return {}
    return {
        "rollout/equal_rewards": mean(float(reason != "") for reason in contrasts),
        "rollout/all_right": mean(float(name == "all_right") for name in equalities),
        "rollout/all_wrong": mean(float(name == "all_wrong") for name in equalities),
        **_shared_states(ended_groups),
        **_repeated_states(ended_groups),
    }


def _shared_states(ended_groups: Sequence[Group]) -> dict[str, float]:
    """Share of turns that begin at the state of another turn of their group.

    GiGPO compares such turns (arXiv:2505.10978). The first turn of each trajectory does not count:
    only the states of later ones follow from the policy's actions. Empty without later turns.
    """
    shared = 0
    turns = 0
    for group in ended_groups:
        states: Counter[str] = Counter()
        for member in group.members:
            if isinstance(member.outcome, Scored):
                states.update(member.summary.states[1:])
        turns += states.total()
        shared += sum(count for count in states.values() if count > 1)
    return {"rollout/shared_states": shared / turns} if turns else {}


def _repeated_states(ended_groups: Sequence[Group]) -> dict[str, float]:
    """How often the same actions led to the same state, which says whether the environment repeats.

    Over the later turns of scored members before which another member of the group had done the
    same since its start: the mean share of those others that are at the same state. Empty without
    such turns.
    """
    agreement = 0.0
    turns = 0
    for group in ended_groups:
        states_after: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for member in group.members:
            summary = member.summary
            # Older checkpoints have members without actions.
            if isinstance(member.outcome, Scored) and summary.actions:
                for turn, state in enumerate(summary.states[1:], 1):
                    states_after[summary.actions[:turn]][state] += 1
        for states in states_after.values():
            members = states.total()
            if members > 1:
                turns += members
                equal_pairs = sum(count * (count - 1) for count in states.values())
                agreement += equal_pairs / (members - 1)
    return {"rollout/repeated_states": agreement / turns} if turns else {}


def _seconds_in(summary: Summary, *names: str) -> float:
    return sum((end - begin for name, begin, end in summary.spans if name in names), 0.0)


def _by_source(name: str, members: Iterable[Member]) -> dict[str, float]:
    counts = Counter(member.summary.source for member in members)
    return {f"rollout/{name}/{source}": float(count) for source, count in counts.items() if source}


def _misjudged(trained: Iterable[Member]) -> dict[str, float]:
    """The share of right answers that the step makes less likely.

    Right: component ``right``, else more than half of ``accuracy``. Other right answers of the
    group earned more.
    """
    less_likely: list[float] = []
    for member in trained:
        if not isinstance(member.outcome, Scored) or member.advantage is None:
            continue
        components = member.outcome.components
        if components.get("right", components.get("accuracy", 0.0)) > 0.5:
            less_likely.append(float(member.advantage < 0))
    return {"rollout/right_negative_advantage": mean(less_likely)} if less_likely else {}


def _reward_metrics(members: Sequence[Member]) -> dict[str, float]:
    """Over fresh scored members: the policy's performance, before any filter."""
    values: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, list[float]] = defaultdict(list)
    flags: Counter[str] = Counter()
    components: list[Mapping[str, float]] = []
    for member in members:
        if not isinstance(member.outcome, Scored) or member.replayed:
            continue
        source = member.summary.source
        components.append(member.outcome.components)
        values["reward"].append(member.outcome.value)
        if source:
            values[f"reward/{source}"].append(member.outcome.value)
        for name, value in member.outcome.components.items():
            values[f"reward/component/{name}"].append(value)
            if source:
                values[f"reward/{source}/component/{name}"].append(value)
            if source and name == "calls":
                calls[source].append(value)
        flags.update(f"flag/{flag}" for flag in member.outcome.flags)

    rewards = values["reward"]
    if not rewards:
        return {}
    return {
        **{f"{name}/mean": mean(numbers) for name, numbers in values.items()},
        **_calibration_error(components),
        **_tool_call_counts(calls),
        **{name: count / len(rewards) for name, count in flags.items()},
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }


def _calibration_error(components: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over the answers whose components have a confidence; empty without any."""
    confident = [parts for parts in components if "confidence" in parts and "right" in parts]
    if not confident:
        return {}
    confidences = [parts["confidence"] for parts in confident]
    rights = [parts["right"] for parts in confident]
    return {"reward/calibration_error": calibration_error(confidences, rights)}


def _tool_call_counts(calls: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The numbers of tool calls of a trajectory, by source."""
    metrics: dict[str, float] = {}
    for source, counts in calls.items():
        metrics[f"tool_call_counts/{source}/min"] = min(counts)
        metrics[f"tool_call_counts/{source}/max"] = max(counts)
        metrics[f"tool_call_counts/{source}/zero_ratio"] = counts.count(0) / len(counts)
    return metrics
