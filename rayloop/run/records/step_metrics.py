"""The metrics of a step that follow from its groups alone: rewards, lengths, how episodes ended,
where trajectories went.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, pstdev
from typing import Any

from rayloop.core.groups import Group, Member, Scored
from rayloop.core.types import EndReason, Summary
from rayloop.grpo.filters import equality, without_contrast
from rayloop.measure.intervals import calibration_error


@dataclass(frozen=True)
class Collected:
    """The ``groups`` of a step (request order), and events since the last one.

    ``finished``: after the filters. ``dropped``: by ``state/source``. ``acceptance``: share that
    survives, averaged. ``replay``: ``ReplayBuffer.stats``, empty when off.
    """

    groups: tuple[Group, ...]
    finished: tuple[Group, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    acceptance: float = 1.0
    replay: Mapping[str, Any] = field(default_factory=dict)


def step_metrics(collected: Collected, target: int) -> dict[str, float]:
    """What the groups that ended were like, and how many trajectories the step took, of the
    ``target``.
    """
    finished, trained = collected.finished, collected.groups
    members = [m for g in finished for m in g.members]
    played = [m for m in members if m.summary.length]
    metrics: dict[str, float] = {
        "rollout/groups": float(len(finished)),
        "rollout/trajectories": float(len(members)),
        "rollout/trained": float(sum(len(g.kept) for g in trained)),
        "rollout/trained_share": sum(len(g.kept) for g in trained) / target,
        "rollout/replayed": float(sum(g.replay_of is not None for g in trained)),
        "rollout/acceptance": collected.acceptance,
        **_reward_metrics(members),
        **_equal_groups(finished),
        **_by_source("trained", [m for g in trained for m in g.kept]),
        **_by_source("played", members),
        **_misjudged([m for g in trained for m in g.scored]),
        **{name: float(count) for name, count in collected.dropped.items()},
        **{
            f"replay/{name}": float(collected.replay[name])
            for name in ("stored", "tasks")
            if collected.replay
        },
    }

    if played:
        summaries = [m.summary for m in played]
        metrics |= {
            "response_length/mean": mean(s.sampled_tokens for s in summaries),
            "response_length/max": float(max(s.sampled_tokens for s in summaries)),
            "response_length/clip_ratio": mean(float(s.cut) for s in summaries),
            "prompt_length/mean": mean(s.length - s.sampled_tokens for s in summaries),
            "rollout/tokens": float(sum(s.sampled_tokens for s in summaries)),
            "rollout/turns/mean": mean(s.turns for s in summaries),
            "rollout/seconds/mean": mean(s.seconds for s in summaries),
            "rollout/seconds/max": max(s.seconds for s in summaries),
            "rollout/seconds/engine": mean(_seconds_in(s, "generate") for s in summaries),
            "rollout/seconds/environment": mean(_seconds_in(s, "reset", "step") for s in summaries),
        }

        if any(s.images for s in summaries):
            metrics |= {
                "rollout/images_sent": float(sum(s.sent.images for s in summaries)),
                "rollout/images_sent_again": float(sum(s.sent.again for s in summaries)),
                "rollout/image_bytes_sent": float(sum(s.sent.bytes for s in summaries)),
            }

        # Always present, so that its curve has a 0 where no episode was completed.
        ends = Counter({str(EndReason.DONE): 0})
        ends.update(str(s.end_reason) for s in summaries)
        metrics |= {f"end_reason/{name}": count / len(summaries) for name, count in ends.items()}
        last = [s.env_result for s in summaries if s.end_reason is EndReason.MAX_TURNS]
        metrics["rollout/paid_at_max_turns"] = sum(
            result is not None and result > 0 for result in last
        ) / len(summaries)

    statuses = Counter(
        f"{m.status.state}/{m.status.reason}" for m in members if m.status is not None
    )
    return metrics | {name: float(count) for name, count in statuses.items()}


def _equal_groups(finished: Sequence[Group]) -> dict[str, float]:
    """Over groups with two fresh scored members at least, whatever the filters made of them: those
    that taught nothing, and those of which every answer was right or wrong.
    """
    groups, answers = list[Sequence[Member]](), list[str]()
    for group in finished:
        scored = [m for m in group.members if isinstance(m.outcome, Scored)]
        fresh = [m.reward for m in scored if not m.replayed]
        if len(fresh) > 1:
            groups.append([m for m in scored if m.credit is not None])
            answers.append(equality(fresh))
    if not groups:
        return {}
    return {
        "rollout/equal_rewards": mean(float(without_contrast(members) != "") for members in groups),
        "rollout/all_right": mean(float(found == "all_right") for found in answers),
        "rollout/all_wrong": mean(float(found == "all_wrong") for found in answers),
        **_shared_states(finished),
    }


def _shared_states(finished: Sequence[Group]) -> dict[str, float]:
    """Of the turns after each trajectory's first one, whose screens the policy's own actions
    brought, those that begin at a state at which another turn of the group begins: what GiGPO
    compares (arXiv:2505.10978). Nothing where no turn is of that kind.
    """
    shared = turns = 0
    for group in finished:
        later = [m.summary.states[1:] for m in group.members if isinstance(m.outcome, Scored)]
        seen = Counter(state for states in later for state in states)
        turns += seen.total()
        shared += sum(times for times in seen.values() if times > 1)
    return {"rollout/shared_states": shared / turns} if turns else {}


def _seconds_in(summary: Summary, *names: str) -> float:
    return sum((end - begin for name, begin, end in summary.spans if name in names), 0.0)


def _by_source(name: str, members: Sequence[Member]) -> dict[str, float]:
    counts = Counter(m.summary.source for m in members)
    return {f"rollout/{name}/{source}": float(count) for source, count in counts.items() if source}


def _misjudged(trained: Sequence[Member]) -> dict[str, float]:
    """The share of right answers (component ``right``, else more than half of ``accuracy``) that
    the step makes less likely: others of the group earned more beside being right.
    """
    scored = [
        (m.advantage, m.outcome.components)
        for m in trained
        if isinstance(m.outcome, Scored) and m.advantage is not None
    ]
    right = [
        advantage < 0
        for advantage, parts in scored
        if parts.get("right", parts.get("accuracy", 0.0)) > 0.5
    ]
    return {"rollout/right_negative_advantage": mean(map(float, right))} if right else {}


def _reward_metrics(members: Sequence[Member]) -> dict[str, float]:
    """Over fresh scored members: the policy's performance, before any filter."""
    values: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, list[float]] = defaultdict(list)
    components: list[Mapping[str, float]] = []
    for member in members:
        if isinstance(member.outcome, Scored) and not member.replayed:
            components.append(member.outcome.components)
            values["reward"].append(member.outcome.value)
            if source := member.summary.source:
                values[f"reward/{source}"].append(member.outcome.value)
            for name, value in member.outcome.components.items():
                values[f"reward/component/{name}"].append(value)
                if source:
                    values[f"reward/{source}/component/{name}"].append(value)
                if source and name == "calls":
                    calls[source].append(value)
            for flag in member.outcome.flags:
                values[f"flag/{flag}"].append(1.0)

    flags = {
        name: len(numbers) / len(values["reward"])
        for name, numbers in values.items()
        if name.startswith("flag/")
    }
    means = {
        f"{name}/mean": mean(numbers)
        for name, numbers in values.items()
        if numbers and not name.startswith("flag/")
    }
    if not values["reward"]:
        return {}

    if sure := [c for c in components if "confidence" in c and "right" in c]:
        means["reward/calibration_error"] = calibration_error(
            [c["confidence"] for c in sure], [c["right"] for c in sure]
        )
    for source, counts in calls.items():
        about = {
            "min": min(counts),
            "max": max(counts),
            "zero_ratio": counts.count(0) / len(counts),
        }
        means |= {f"tool_call_counts/{source}/{name}": value for name, value in about.items()}
    return (
        means
        | flags
        | {
            "reward/std": pstdev(values["reward"]),
            "reward/min": min(values["reward"]),
            "reward/max": max(values["reward"]),
        }
    )
