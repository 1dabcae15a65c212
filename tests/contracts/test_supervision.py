"""What a run does about each failure: what is played again, replaced, left out and counted, and how
the run ends.

The real driver runs in a simulated cluster (tests/support/simulated_cluster.py) whose actors fail
as a schedule says. Nothing here knows how failures are handled inside: a case names the failure,
and then what a user sees of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ledger_closes
from tests.support.simulated_cluster import Ended, Fault, simulate

BAD, ONE = ("train-3",), (1,)
"""The task, and the member of its group, that something is wrong with."""
N3 = ("a", "b", "c")
SPREAD = {"environment": ("a", "b"), "rollout": ("a", "b"), "reward": ("a", "b"), "policy": ("c",)}
"""The policy on a node of its own, the others on two."""
BESIDE = {**SPREAD, "policy": ("b",)}
"""The policy on a node with others."""
REPLACED = {"worker_lost": 1, "worker_replaced": 1}
SHARED = {"episode_failed": 4, **REPLACED}
"""An actor ended, and with it the group that it played."""
REBUILT = {"policy_lost": 1, "policy_rebuilt": 1}
COMPARED = (
    "episode_failed",
    "worker_lost",
    "worker_replaced",
    "replacement_failed",
    "node_lost",
    "node_avoided",
    "policy_lost",
    "policy_rebuilt",
    "payload_lost",
    "weights_lost",
    "checkpoint_failed",
    "checkpoint_damaged",
    "unscored",
    "probe_failed",
    "silent",
    "preempted",
)
"""Kinds of events whose numbers are compared.

Others are of every run, or depend on how long something took.
"""


def member(cause: str, **selectors: Any) -> Fault:
    """In episodes of one member of one group."""
    return Fault("episode", cause, tasks=BAD, samples=ONE, **selectors)


def once(at: str, cause: str, **selectors: Any) -> Fault:
    """In the first such call after the first step."""
    return Fault(at, cause, step=1, times=1, **selectors)


def less(excluded: str) -> dict[str, int]:
    """The ledger of three steps, for one of which a group was played in place of a member that was
    left out.
    """
    return {"trained": 24, excluded: 1, "surplus[cut]": 3, "surplus[left_over]": 4}


def group_less(excluded: str) -> dict[str, int]:
    """The ledger of 14 steps of which one lacked a group."""
    return {"trained": 112, excluded: 4, "surplus[left_over]": 52}


@dataclass(frozen=True)
class Case:
    """``tries``: the highest number of an attempt; ``why``: a part of the error's text; ``step``:
    the last one trained.
    """

    name: str
    faults: tuple[Fault, ...]
    code: int
    counts: Mapping[str, int]
    events: Mapping[str, int]
    quarantined: tuple[str, ...]
    tries: int
    why: str
    step: int | None
    changes: Mapping[str, Any] = field(default_factory=dict)


def case(
    name: str,
    *faults: Fault,
    code: int = 0,
    counts: Mapping[str, int] = {"trained": 24},
    events: Mapping[str, int] = {},
    quarantined: tuple[str, ...] = (),
    tries: int = 0,
    why: str = "",
    step: int | None = None,
    **changes: Any,
) -> Case:
    """By default a run ends well after three steps of two groups of four.

    ``counts`` are of final states.
    """
    return Case(name, faults, code, counts, events, quarantined, tries, why, step, changes)


CASES = [
    # an episode of a group ------------------------------------------------------------------------
    case("nothing fails"),
    case(
        "one episode, once: environment raised",
        member("environment raised", times=1),
        events={"episode_failed": 1},
        tries=1,
    ),
    case(
        "one episode, always: environment raised",
        member("environment raised"),
        counts=less("excluded[environment_failure]"),
        events={"episode_failed": 3, "unscored": 1},
        tries=2,
    ),
    case(
        "one episode, once: environment bug",
        member("environment bug", times=1),
        events={"episode_failed": 1},
        tries=1,
    ),
    case(
        "one episode, always: environment bug",
        member("environment bug"),
        counts=less("excluded[environment_failure]"),
        events={"episode_failed": 2, "unscored": 1},
        tries=1,
    ),
    case(
        "one episode, once: environment hung",
        member("environment hung", times=1),
        events={"episode_failed": 1, "worker_lost": 1, "worker_replaced": 1},
        tries=1,
    ),
    case(
        "one episode, always: environment hung",
        member("environment hung"),
        counts=less("excluded[environment_failure]"),
        events={"episode_failed": 3, "worker_lost": 3, "worker_replaced": 3, "unscored": 1},
        quarantined=BAD,
        tries=2,
    ),
    case(
        "one episode, once: environment hung, contained",
        member("environment hung, contained", times=1),
        events={"episode_failed": 1},
        tries=1,
    ),
    case(
        "one episode, always: environment hung, contained",
        member("environment hung, contained"),
        counts=less("excluded[environment_failure]"),
        events={"episode_failed": 3, "unscored": 1},
        quarantined=BAD,
        tries=2,
    ),
    case(
        "one episode, once: bad data",
        member("bad data", times=1),
        events={"episode_failed": 1},
        tries=1,
    ),
    case(
        "one episode, always: bad data",
        member("bad data"),
        counts=less("excluded[bad_data]"),
        events={"episode_failed": 1, "unscored": 1},
        quarantined=BAD,
        tries=1,
    ),
    case(
        "one episode, once: over long prompt",
        member("over long prompt", times=1),
        counts=less("excluded[over_long_prompt]"),
        events={"unscored": 1},
    ),
    case(
        "one episode, once: network",
        member("network", times=1),
        events={"episode_failed": 1},
        tries=1,
    ),
    case("one episode, once: bug", member("bug", times=1), events={"episode_failed": 1}, tries=1),
    case(
        "one episode, always: bug",
        member("bug"),
        counts=less("excluded[environment_failure]"),
        events={"episode_failed": 3, "unscored": 1},
        tries=2,
    ),
    case(
        "one episode, once: unavailable",
        member("unavailable", times=1),
        events={"episode_failed": 1},
        tries=1,
    ),
    case("one episode ends its actor, once: died", member("died", times=1), events=SHARED, tries=1),
    case(
        "one episode ends its actor, once: out of memory",
        member("out of memory", times=1),
        events=SHARED,
        tries=1,
    ),
    case(
        "one episode ends its actor, once: crashed",
        member("crashed", times=1),
        events=SHARED,
        tries=1,
    ),
    case(
        "one episode ends its actor, once: silent",
        member("silent", times=1),
        events=SHARED,
        tries=1,
    ),
    case(
        "one episode ends its actor, always: died",
        member("died"),
        counts=less("excluded[environment_failure]"),
        events={
            "episode_failed": 7,
            "worker_lost": 4,
            "worker_replaced": 4,
            "node_avoided": 1,
            "unscored": 1,
        },
        tries=3,
    ),
    case(
        "one episode ends its actor, always: silent",
        member("silent"),
        counts={
            "trained": 24,
            "excluded[environment_failure]": 3,
            "excluded[min_group]": 1,
            "surplus[left_over]": 8,
        },
        events={"episode_failed": 6, "worker_lost": 3, "worker_replaced": 3, "unscored": 1},
        quarantined=BAD,
        tries=2,
    ),
    case(
        "one attempt is allowed",
        member("environment raised", attempts=(0,)),
        counts=less("excluded[environment_failure]"),
        events={"episode_failed": 1, "unscored": 1},
        environment__attempts=1,
    ),
    case(
        "two attempts are allowed, and the third would go well",
        member("environment raised", attempts=(0, 1)),
        counts=less("excluded[environment_failure]"),
        events={"episode_failed": 2, "unscored": 1},
        tries=1,
        environment__attempts=2,
    ),
    case(
        "the third attempt goes well",
        member("environment raised", attempts=(0, 1)),
        events={"episode_failed": 2},
        tries=2,
    ),
    case(
        "a shared death charges nobody",
        member("died", times=1),
        events=SHARED,
        tries=1,
        environment__attempts=1,
    ),
    case(
        "a death that nobody shared is charged",
        member("died", times=1),
        counts={"trained": 24, "excluded[environment_failure]": 4, "surplus[left_over]": 8},
        events={"episode_failed": 4, "worker_lost": 1, "worker_replaced": 1, "unscored": 1},
        environment__attempts=1,
        environment__episodes_per_call=1,
    ),
    case(
        "each episode in a call of its own",
        member("died", times=1),
        events=SHARED,
        tries=1,
        environment__episodes_per_call=1,
    ),
    # a task, or an actor, that fails always -------------------------------------------------------
    case(
        "a task whose every episode fails: environment raised",
        Fault("episode", "environment raised", tasks=BAD),
        counts={"trained": 112, "excluded[environment_failure]": 8, "surplus[left_over]": 48},
        events={"episode_failed": 24, "unscored": 1},
        quarantined=BAD,
        tries=2,
        steps=14,
    ),
    case(
        "a task whose every episode fails: environment bug",
        Fault("episode", "environment bug", tasks=BAD),
        counts={"trained": 112, "excluded[environment_failure]": 8, "surplus[left_over]": 48},
        events={"episode_failed": 16, "unscored": 1},
        quarantined=BAD,
        tries=1,
        steps=14,
    ),
    case(
        "a task whose every episode fails: environment hung",
        Fault("episode", "environment hung", tasks=BAD),
        counts=group_less("excluded[environment_failure]"),
        events={"episode_failed": 12, "worker_lost": 2, "worker_replaced": 2, "unscored": 1},
        quarantined=BAD,
        tries=1,
        steps=14,
    ),
    case(
        "a task whose every episode fails: environment hung, contained",
        Fault("episode", "environment hung, contained", tasks=BAD),
        counts=group_less("excluded[environment_failure]"),
        events={"episode_failed": 8, "unscored": 1},
        quarantined=BAD,
        tries=1,
        steps=14,
    ),
    case(
        "a task whose every episode fails: bad data",
        Fault("episode", "bad data", tasks=BAD),
        counts=group_less("excluded[bad_data]"),
        events={"episode_failed": 4, "unscored": 1},
        quarantined=BAD,
        tries=1,
        steps=14,
    ),
    case(
        "a task whose every episode fails: over long prompt",
        Fault("episode", "over long prompt", tasks=BAD),
        counts={"trained": 112, "excluded[over_long_prompt]": 8, "surplus[left_over]": 48},
        events={"unscored": 1},
        steps=14,
    ),
    case(
        "a task whose every episode fails: died",
        Fault("episode", "died", tasks=BAD),
        counts={
            "trained": 112,
            "excluded[environment_failure]": 15,
            "excluded[min_group]": 1,
            "surplus[left_over]": 52,
        },
        events={
            "episode_failed": 68,
            "worker_lost": 26,
            "worker_replaced": 26,
            "node_avoided": 1,
            "unscored": 1,
        },
        tries=3,
        steps=14,
    ),
    case(
        "one actor is sick",
        Fault("episode", "environment raised", role="environment", serials=(1,), step=1),
        counts={"trained": 64},
        events={"episode_failed": 12, "worker_lost": 1, "worker_replaced": 1},
        tries=1,
        steps=8,
    ),
    case(
        "one actor finds all data bad",
        Fault("episode", "bad data", role="environment", serials=(1,), step=1),
        counts={"trained": 64},
        events={"episode_failed": 12, "worker_lost": 1, "worker_replaced": 1},
        tries=1,
        steps=8,
    ),
    case(
        "one engine finds all data bad",
        Fault("generate", "bad data", role="rollout", serials=(1,), step=1),
        counts={"trained": 64},
        events={"episode_failed": 8},
        tries=1,
        steps=8,
    ),
    case(
        "bad data where one actor is all there is",
        Fault("episode", "bad data", tasks=BAD),
        counts={"trained": 24, "excluded[bad_data]": 4, "surplus[left_over]": 8},
        events={"unscored": 1},
        quarantined=BAD,
        environment__actors=1,
    ),
    case(
        "bad data on one node of two",
        Fault("episode", "bad data", tasks=BAD, nodes=("a",)),
        events={"episode_failed": 4},
        tries=1,
        nodes=N3,
        homes=SPREAD,
    ),
    case(
        "the environment never works",
        Fault("episode", "environment raised"),
        code=1,
        counts={},
        events={"episode_failed": 12, "probe_failed": 4},
        tries=2,
        why="none of 4 tasks could be played for the ",
        step=0,
    ),
    case(
        "the environment works no more after a step",
        Fault("episode", "environment raised", step=1),
        code=1,
        counts={"trained": 8, "excluded[environment_failure]": 32},
        events={"episode_failed": 96, "worker_lost": 2, "worker_replaced": 2, "unscored": 1},
        tries=2,
        why="0 of 8 trajectories survived 4 generation batches, fewer than mi",
        step=1,
    ),
    case(
        "all data is bad",
        Fault("episode", "bad data"),
        code=1,
        counts={},
        events={"episode_failed": 4, "probe_failed": 4},
        quarantined=("train-0", "train-1", "train-2", "train-3"),
        tries=1,
        why="none of 4 tasks could be played for the ",
        step=0,
    ),
    case(
        "all data is bad after a step",
        Fault("episode", "bad data", step=1),
        code=1,
        counts={"trained": 8, "excluded[bad_data]": 32},
        events={"episode_failed": 32, "unscored": 1},
        quarantined=(
            "train-2",
            "train-3",
            "train-4",
            "train-5",
            "train-6",
            "train-7",
            "train-8",
            "train-9",
        ),
        tries=1,
        why="0 of 8 trajectories survived 4 generation batches, fewer than mi",
        step=1,
    ),
    # a call of an environment actor ---------------------------------------------------------------
    case("a call of a group: died", once("play", "died"), events=SHARED, tries=1),
    case("a call of a group: unavailable", once("play", "unavailable"), events=SHARED, tries=1),
    case("a call of a group: out of memory", once("play", "out of memory"), events=SHARED, tries=1),
    case(
        "a call of a group: object store full",
        once("play", "object store full"),
        events=SHARED,
        tries=1,
    ),
    case("a call of a group: cancelled", once("play", "cancelled"), events=SHARED, tries=1),
    case("a call of a group: silent", once("play", "silent"), events=SHARED, tries=1),
    case("a call of a group: spent", once("play", "spent"), events=SHARED, tries=1),
    case(
        "a call of a group: bug",
        once("play", "bug"),
        code=1,
        counts={"trained": 8},
        why="KeyError: 'turn'",
        step=1,
    ),
    case(
        "a call of a group: own node is going",
        once("play", "own node is going"),
        code=69,
        counts={"trained": 8},
        why="LocalRayletDiedError: The task's local raylet died. Check raylet",
        step=1,
    ),
    case(
        "a call of a group: reservation removed",
        once("play", "reservation removed"),
        code=69,
        counts={"trained": 8},
        why="ActorPlacementGroupRemoved: The placement group corresponding to",
        step=1,
    ),
    # replacements ---------------------------------------------------------------------------------
    case(
        "environments die for ever",
        Fault("episode", "died"),
        code=69,
        counts={},
        events={
            "episode_failed": 6,
            "worker_lost": 6,
            "worker_replaced": 4,
            "node_avoided": 1,
            "probe_failed": 2,
        },
        tries=2,
        why="the environment role had fewer than 1 of 2 actors in service, an",
        step=0,
        recovery__replacements=2,
        recovery__start_timeout=50,
    ),
    case(
        "the replacement never starts",
        once("play", "died"),
        Fault("health", "silent", role="environment", step=1),
        code=69,
        counts={"trained": 8},
        events={"episode_failed": 8, "worker_lost": 1, "replacement_failed": 1},
        why="the environment role had fewer than 1 of 1 actors in service, an",
        step=1,
        environment__actors=1,
        recovery__replacements=2,
        recovery__start_timeout=60,
    ),
    case(
        "the replacement fails once",
        once("play", "died"),
        once("health", "died", role="environment"),
        events={
            "episode_failed": 8,
            "worker_lost": 1,
            "worker_replaced": 1,
            "replacement_failed": 1,
        },
        tries=1,
        environment__actors=1,
    ),
    case(
        "no replacement is allowed",
        once("play", "died"),
        code=69,
        counts={"trained": 8},
        events={"episode_failed": 8, "worker_lost": 1},
        why="the environment role had fewer than 1 of 1 actors in service, an",
        step=1,
        environment__actors=1,
        recovery__replacements=0,
        recovery__start_timeout=60,
    ),
    case(
        "no replacement is allowed, and one of two is left",
        once("play", "died"),
        events={"episode_failed": 4, "worker_lost": 1},
        tries=1,
        recovery__replacements=0,
        recovery__start_timeout=60,
    ),
    case(
        "no replacement is allowed, and the only one died",
        once("play", "died"),
        Fault("train", "silent", step=2, times=1),
        code=69,
        counts={"trained": 8},
        events={"episode_failed": 8, "worker_lost": 1},
        why="the environment role had fewer than 1 of 1 actors in service, an",
        step=1,
        recovery__replacements=0,
        recovery__start_timeout=60,
        environment__actors=1,
        recovery__health_every=1.0,
    ),
    case(
        "a hang costs no replacement",
        member("environment hung", times=1),
        events={"episode_failed": 1, "worker_lost": 1, "worker_replaced": 1},
        tries=1,
        recovery__replacements=0,
        recovery__start_timeout=60,
    ),
    # engines --------------------------------------------------------------------------------------
    case("a request: died", once("generate", "died"), events=REPLACED),
    case("a request: silent", once("generate", "silent"), events=REPLACED),
    case("a request: unavailable", once("generate", "unavailable"), events=REPLACED),
    case("a request: object lost", once("generate", "object lost"), events=REPLACED),
    case(
        "a request: bad data", once("generate", "bad data"), events={"episode_failed": 1}, tries=1
    ),
    case("a request: network", once("generate", "network"), events={"episode_failed": 1}, tries=1),
    case(
        "a request: over long prompt",
        once("generate", "over long prompt"),
        counts={"trained": 24, "excluded[over_long_prompt]": 1, "surplus[left_over]": 7},
        events={"unscored": 1},
    ),
    case("a request: bug", once("generate", "bug"), events={"episode_failed": 1}, tries=1),
    case(
        "engines die for ever",
        Fault("generate", "died", step=1),
        code=69,
        counts={"trained": 8},
        events={"episode_failed": 8, "worker_lost": 6, "worker_replaced": 4, "node_avoided": 1},
        why="the rollout role had fewer than 1 of 2 actors in service, and no",
        step=1,
        recovery__replacements=2,
        recovery__start_timeout=60,
    ),
    case(
        "an idle engine died",
        once("health", "died", role="rollout"),
        events=REPLACED,
        recovery__health_every=1.0,
    ),
    case(
        "an idle engine is silent",
        once("health", "silent", role="rollout"),
        events=REPLACED,
        recovery__health_every=1.0,
        recovery__health_timeout=2.0,
    ),
    case(
        "an idle engine raises",
        once("health", "bug", role="rollout"),
        code=1,
        counts={"trained": 8},
        why="KeyError: 'turn'",
        step=1,
        recovery__health_every=1.0,
    ),
    # rewards --------------------------------------------------------------------------------------
    case("a call of a reward: died", once("score", "died"), events=REPLACED),
    case("a call of a reward: unavailable", once("score", "unavailable"), events=REPLACED),
    case("a call of a reward: silent", once("score", "silent"), events=REPLACED),
    case("a call of a reward: spent", once("score", "spent"), events=REPLACED),
    case("a call of a reward: object lost", once("score", "object lost")),
    case(
        "a call of a reward: judge outage",
        once("score", "judge outage"),
        code=69,
        counts={"trained": 8},
        why="the judge has not answered for 600 s",
        step=1,
    ),
    case(
        "a call of a reward: bad settings",
        once("score", "bad settings"),
        code=2,
        counts={"trained": 8},
        why="reward.source: no such column",
        step=1,
    ),
    case(
        "a call of a reward: bug",
        once("score", "bug"),
        code=1,
        counts={"trained": 8},
        why="KeyError: 'turn'",
        step=1,
    ),
    case(
        "one trajectory, once: unscored reward_unavailable",
        Fault("score", "unscored reward_unavailable", tasks=BAD, samples=ONE, times=1),
    ),
    case(
        "one trajectory, once: unscored timeout",
        Fault("score", "unscored timeout", tasks=BAD, samples=ONE, times=1),
        counts=less("excluded[timeout]"),
        events={"unscored": 1},
    ),
    case(
        "one trajectory, once: unscored grader_error",
        Fault("score", "unscored grader_error", tasks=BAD, samples=ONE, times=1),
        counts=less("excluded[grader_error]"),
        events={"unscored": 1},
    ),
    case(
        "one trajectory, once: unscored bad_data",
        Fault("score", "unscored bad_data", tasks=BAD, samples=ONE, times=1),
        counts=less("excluded[bad_data]"),
        events={"unscored": 1},
    ),
    case(
        "one trajectory, once: unscored invalid_reward",
        Fault("score", "unscored invalid_reward", tasks=BAD, samples=ONE, times=1),
        counts=less("excluded[invalid_reward]"),
        events={"unscored": 1},
    ),
    case(
        "one trajectory, always: unscored reward_unavailable",
        Fault("score", "unscored reward_unavailable", tasks=BAD, samples=ONE),
        counts=less("excluded[reward_unavailable]"),
        events={"unscored": 1},
    ),
    case(
        "rewards die for ever",
        Fault("score", "died", step=1),
        code=1,
        counts={"trained": 8, "excluded[reward_unavailable]": 32},
        events={"worker_lost": 12, "worker_replaced": 12, "node_avoided": 1, "unscored": 1},
        why="0 of 8 trajectories survived 4 generation batches, fewer than mi",
        step=1,
        recovery__replacements=20,
    ),
    case(
        "rewards die for ever, few replacements",
        Fault("score", "died", step=1),
        code=69,
        counts={"trained": 8, "excluded[reward_unavailable]": 8},
        events={"worker_lost": 6, "worker_replaced": 4, "node_avoided": 1, "unscored": 1},
        why="the reward role had fewer than 1 of 2 actors in service, and non",
        step=1,
        recovery__replacements=2,
        recovery__start_timeout=60,
    ),
    case(
        "one of a group judged together is unavailable once",
        Fault("score", "unscored reward_unavailable", tasks=BAD, samples=ONE, times=1),
        reward__per="group",
    ),
    case(
        "the only reward actor is unable once",
        Fault("score", "unscored reward_unavailable", tasks=BAD, samples=ONE, times=1),
        counts=less("excluded[reward_unavailable]"),
        events={"unscored": 1},
        reward__actors=1,
    ),
    case(
        "the grader raises for all",
        Fault("score", "unscored grader_error"),
        code=1,
        counts={"excluded[grader_error]": 32},
        events={"unscored": 1},
        why="0 of 8 trajectories survived 4 generation batches, fewer than mi",
        step=0,
    ),
    # the reference --------------------------------------------------------------------------------
    case(
        "a call of the reference: died",
        once("annotate", "died"),
        events=REPLACED,
        reference__kind="actor",
        policy__loss={"kl_coef": 0.1},
    ),
    case(
        "a call of the reference: silent",
        once("annotate", "silent"),
        events=REPLACED,
        reference__kind="actor",
        policy__loss={"kl_coef": 0.1},
    ),
    case(
        "a call of the reference: object lost",
        once("annotate", "object lost"),
        code=69,
        counts={"trained": 8},
        why="ObjectLostError: Failed to retrieve object 00. To see informatio",
        step=1,
        reference__kind="actor",
        policy__loss={"kl_coef": 0.1},
    ),
    case(
        "a call of the reference: bug",
        once("annotate", "bug"),
        code=1,
        counts={"trained": 8},
        why="KeyError: 'turn'",
        step=1,
        reference__kind="actor",
        policy__loss={"kl_coef": 0.1},
    ),
    case(
        "the reference dies for ever",
        Fault("annotate", "died", step=1),
        code=69,
        counts={"trained": 8},
        events={"worker_lost": 3, "worker_replaced": 2, "node_avoided": 1},
        why="reference.annotate failed 3 times, last: The actor died unexpect",
        step=1,
        recovery__replacements=2,
        recovery__start_timeout=60,
        reference__kind="actor",
        policy__loss={"kl_coef": 0.1},
    ),
    # the policy's ranks ---------------------------------------------------------------------------
    case("train of a rank: died", once("train", "died", role="policy"), events=REBUILT),
    case("train of a rank: silent", once("train", "silent", role="policy"), events=REBUILT),
    case(
        "train of a rank: bug",
        once("train", "bug", role="policy"),
        code=1,
        counts={"trained": 8},
        why="KeyError: 'turn'",
        step=1,
    ),
    case("export of a rank: died", once("export", "died", role="policy"), events=REBUILT),
    case("fetch of a rank: died", once("fetch", "died", role="policy"), events=REBUILT),
    case("save of a rank: died", once("save", "died", role="policy"), events=REBUILT),
    case(
        "save of a rank: silent",
        once("save", "silent", role="policy"),
        code=69,
        counts={"trained": 8},
        why="a checkpoint was not written within 100 s (policy.step_timeout)",
        step=1,
    ),
    case(
        "save of a rank: bug",
        once("save", "bug", role="policy"),
        code=1,
        counts={"trained": 8},
        why="KeyError: 'turn'",
        step=1,
    ),
    case("join of a rank: died", Fault("join", "died", role="policy", times=1), events=REBUILT),
    case("train of a rank: unavailable", once("train", "unavailable")),
    case("train of a rank: out of memory", once("train", "out of memory"), events=REBUILT),
    case(
        "train of a rank: CUDA out of memory",
        once("train", "CUDA out of memory"),
        code=1,
        counts={"trained": 8},
        why="OutOfMemoryError: CUDA out of memory",
        step=1,
    ),
    case("train of a rank: CUDA error", once("train", "CUDA error"), events=REBUILT),
    case(
        "train of a rank: collective",
        once("train", "collective"),
        code=1,
        counts={"trained": 8},
        why="RuntimeError: Connection closed by peer",
        step=1,
    ),
    case(
        "train of a rank: diverged",
        once("train", "diverged"),
        code=1,
        counts={"trained": 8},
        why="the loss is not finite",
        step=1,
    ),
    case(
        "train of a rank: own node is going",
        once("train", "own node is going"),
        code=69,
        counts={"trained": 8},
        why="LocalRayletDiedError: The task's local raylet died. Check raylet",
        step=1,
    ),
    case("train of a rank: object lost", once("train", "object lost"), events=REBUILT),
    case(
        "train of one of two ranks: collective",
        once("train", "collective", slots=(1,)),
        events=REBUILT,
        policy__ranks=2,
    ),
    case(
        "a rank dies for ever",
        Fault("train", "died", step=1),
        code=69,
        counts={"trained": 8},
        events={"policy_lost": 3, "policy_rebuilt": 2},
        why="the policy group failed in train: The actor died unexpectedly be",
        step=1,
        recovery__policy_restarts=2,
        recovery__start_timeout=60,
    ),
    case(
        "no restart of the policy is allowed",
        once("train", "died"),
        code=69,
        counts={"trained": 8},
        events={"policy_lost": 1},
        why="the policy group failed in train: The actor died unexpectedly be",
        step=1,
        recovery__policy_restarts=0,
        recovery__start_timeout=60,
    ),
    case("a rank dies in the first step", Fault("train", "died", times=1), events=REBUILT),
    case(
        "a rank dies in the check of its log-probs",
        Fault("compare", "died", times=1),
        events=REBUILT,
    ),
    case(
        "a rank dies while groups are played",
        once("train", "died"),
        counts={"trained": 24, "cancelled": 8, "surplus[run_ended]": 8},
        events=REBUILT,
        algorithm__staleness={"max_staleness": 1},
    ),
    case(
        "a rank dies long after a checkpoint",
        Fault("train", "died", step=2, times=1),
        events=REBUILT,
        checkpoint__every=10,
    ),
    # weights --------------------------------------------------------------------------------------
    case("load of an engine: died", once("load", "died", role="rollout"), events=REPLACED),
    case(
        "load of an engine: silent",
        once("load", "silent", role="rollout"),
        events={"weights_lost": 1},
    ),
    case(
        "load of an engine: bug",
        once("load", "bug", role="rollout"),
        code=1,
        counts={"trained": 8},
        why="KeyError: 'turn'",
        step=1,
    ),
    case(
        "load of an engine: weights changed on the way",
        once("load", "weights changed on the way", role="rollout"),
        code=1,
        counts={"trained": 8},
        why="layer.0: another checksum",
        step=1,
    ),
    case(
        "load of an engine: object lost",
        once("load", "object lost", role="rollout"),
        events=REBUILT,
    ),
    case(
        "the weights for a new engine are lost",
        once("generate", "died"),
        Fault("load", "object lost", role="rollout", serials=(3,), times=1),
        events={"worker_lost": 1, "worker_replaced": 1, "weights_lost": 1},
    ),
    # checkpoints ----------------------------------------------------------------------------------
    case(
        "no room for a checkpoint, 1 times",
        once("save", "no room for a checkpoint"),
        counts={"trained": 48},
        events={"checkpoint_failed": 1},
        steps=6,
    ),
    case(
        "no room for a checkpoint, 3 times",
        Fault("save", "no room for a checkpoint", step=1, times=3),
        counts={"trained": 48},
        events={"checkpoint_failed": 3},
        steps=6,
    ),
    case(
        "no room for a checkpoint, 4 times",
        Fault("save", "no room for a checkpoint", step=1, times=4),
        counts={"trained": 48},
        events={"checkpoint_failed": 4},
        steps=6,
    ),
    case(
        "no room for a checkpoint, for longer than start_timeout",
        Fault("save", "no room for a checkpoint", step=1),
        code=69,
        counts={"trained": 32},
        events={"checkpoint_failed": 4},
        why="the checkpoint of step 4 could not be written below ",
        step=4,
        steps=6,
    ),
    case(
        "the storage fails while a rank saves",
        once("save", "storage"),
        code=69,
        counts={"trained": 8},
        why="the storage is away",
        step=1,
    ),
    case(
        "a rank dies while it saves beside training",
        once("finish_save", "died"),
        events=REBUILT,
        checkpoint__asynchronous=True,
    ),
    case(
        "the newest checkpoint is damaged",
        Fault("train", "died", step=2, times=1),
        Fault("load", "damaged", role="policy", times=1),
        events={"policy_lost": 1, "policy_rebuilt": 1, "checkpoint_damaged": 1},
    ),
    case(
        "every checkpoint is damaged",
        Fault("train", "died", step=2, times=1),
        Fault("load", "damaged", role="policy"),
        code=1,
        counts={"trained": 16},
        events=REBUILT,
        why="cannot be restored: trainer/rank-0: its text is not the one that",
        step=2,
    ),
    # nodes ----------------------------------------------------------------------------------------
    case(
        "a node with half of the actors",
        once("play", "node lost", nodes=("b",)),
        events={"episode_failed": 4, "worker_lost": 3, "worker_replaced": 3, "node_lost": 1},
        tries=1,
        recovery__replacements=1,
        nodes=N3,
        homes=SPREAD,
    ),
    case(
        "a node costs one unit",
        once("play", "node lost", nodes=("b",)),
        events={"episode_failed": 4, "worker_lost": 3, "worker_replaced": 2, "node_lost": 1},
        tries=1,
        recovery__replacements=0,
        recovery__start_timeout=60,
        nodes=N3,
        homes=SPREAD,
    ),
    case(
        "a node with payloads",
        once("annotate", "node lost", nodes=("b",)),
        reference__actors=2,
        reference__kind="actor",
        policy__loss={"kl_coef": 0.1},
        nodes=N3,
        homes=SPREAD,
    ),
    case(
        "a node with payloads and the policy",
        once("fetch", "node lost"),
        events={
            "worker_replaced": 3,
            "node_lost": 1,
            "policy_lost": 1,
            "policy_rebuilt": 1,
            "weights_lost": 1,
        },
        nodes=N3,
        homes=BESIDE,
    ),
    case(
        "the node of the policy",
        once("train", "node lost"),
        events={"node_lost": 1, "policy_lost": 1, "policy_rebuilt": 1},
        nodes=N3,
        homes=SPREAD,
    ),
    case(
        "the node of all",
        once("score", "node lost"),
        events={
            "worker_lost": 2,
            "worker_replaced": 6,
            "node_lost": 1,
            "policy_lost": 1,
            "policy_rebuilt": 1,
            "weights_lost": 2,
        },
        # no check of idle actors comes before the head knows of the node
        recovery__health_every=30.0,
    ),
    case(
        "a node is avoided",
        Fault("play", "died", nodes=("b",), step=1, times=3),
        counts={"trained": 48},
        events={"episode_failed": 12, "worker_lost": 3, "worker_replaced": 3, "node_avoided": 1},
        tries=1,
        steps=6,
        nodes=N3,
        homes=SPREAD,
    ),
    # stops ----------------------------------------------------------------------------------------
    case(
        "a stop while groups are played",
        once("episode", "stop"),
        code=75,
        counts={"trained": 8},
        events={"preempted": 1},
        why="stopped at step 1 of 3, saved; run again to continue from step 1",
        step=1,
    ),
    case(
        "a stop in an update",
        once("train", "stop"),
        code=75,
        counts={"trained": 16},
        events={"preempted": 1},
        why="stopped at step 2 of 3, saved; run again to continue from step 2",
        step=2,
    ),
    case(
        "a stop before the first step",
        Fault("episode", "stop", times=1),
        code=75,
        counts={},
        events={"preempted": 1},
        why="stopped at step 0 of 3, saved; run again to continue from step 0",
        step=0,
    ),
    case("a stop in the last update", Fault("train", "stop", step=2, times=1)),
    case(
        "a stop, and a rank dies",
        once("train", "stop"),
        once("train", "died"),
        code=75,
        counts={"trained": 8},
        events={"policy_lost": 1, "preempted": 1},
        why="stopped at step 1 of 3, saved; run again to continue from step 1",
        step=1,
    ),
    case(
        "a stop, and saving hangs",
        Fault("episode", "stop", step=2, times=1),
        Fault("save", "silent", step=2),
        code=1,
        counts={"trained": 16},
        why="stopped at step 2 of 3, not saved: the checkpoint was not writte",
        step=2,
        checkpoint__every=10,
        policy__step_timeout=1000.0,
    ),
    case(
        "a stop, and no room for a checkpoint",
        Fault("episode", "stop", step=2, times=1),
        Fault("save", "no room for a checkpoint", step=2),
        code=1,
        counts={"trained": 16},
        events={"checkpoint_failed": 4},
        why="stopped at step 2 of 3, not saved: the checkpoint of step 2 coul",
        step=2,
        checkpoint__every=10,
    ),
    case(
        "a stop, and the judge is gone",
        once("episode", "stop"),
        Fault("score", "judge outage", step=1),
        code=75,
        counts={"trained": 8},
        events={"preempted": 1},
        why="stopped at step 1 of 3, saved; run again to continue from step 1",
        step=1,
    ),
    case(
        "a stop of an asynchronous run",
        once("episode", "stop"),
        code=75,
        counts={"trained": 8},
        events={"preempted": 1},
        why="stopped at step 1 of 3, saved; run again to continue from step 1",
        step=1,
        algorithm__staleness={"max_staleness": 1},
    ),
    # stalls and starts ----------------------------------------------------------------------------
    case(
        "nothing moves",
        once("train", "silent"),
        code=69,
        counts={"trained": 8},
        why="nothing moved for 91 s in phase update_actor, awaited: train of ",
        step=1,
        recovery__stall_timeout=90.0,
    ),
    case(
        "an episode that nothing bounds",
        once("episode", "silent"),
        code=69,
        counts={"trained": 8},
        why="nothing moved for 151 s in phase gen, awaited: episodes 3/0@0 to",
        step=1,
        recovery__stall_timeout=150.0,
    ),
    case(
        "an engine does not start",
        Fault("health", "silent", role="rollout", times=1),
        code=69,
        counts={},
        why="start of rollout 0 did not answer within 300 s",
        step=0,
    ),
    case(
        "an engine dies once at its start",
        Fault("health", "died", role="rollout", times=1),
        events={"replacement_failed": 1},
    ),
    case(
        "an engine dies at each start",
        Fault("health", "died", role="rollout", times=3),
        code=69,
        counts={},
        events={"replacement_failed": 2},
        why="ActorDiedError: The actor died unexpectedly before finishing thi",
        step=0,
        rollout__actors=1,
    ),
    case("a rank dies at its start", Fault("address", "died", times=1), events=REBUILT),
]
BY_NAME = {case.name: case for case in CASES}


def played(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Run a case."""
    for fault in case.faults:
        fault.happened = 0
    return simulate(folder, monkeypatch, case.faults, **case.changes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_failure_has_one_outcome(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = played(case, tmp_path, monkeypatch)
    assert ended.code == case.code, ended.why
    assert case.why in ended.why
    final = {
        name: n
        for name, n in ended.counts.items()
        if name not in ("issued", "in_flight", "ready", "attempts", "replayed")
    }
    assert final == case.counts
    assert {kind: ended.kinds[kind] for kind in COMPARED if ended.kinds[kind]} == case.events
    assert ended.quarantined == set(case.quarantined)
    assert max((episode.attempt for episode in ended.episodes), default=0) == case.tries
    assert case.step in (None, ended.step)
    # Of every run, however it ends:
    live = ended.counts.get("in_flight", 0) + ended.counts.get("ready", 0)
    assert ended.counts.get("issued", 0) == sum(final.values()) + live, (
        "each trajectory is counted once"
    )
    assert ended.unearned == set(), "no infrastructure failure is a reward"
    assert ended.kinds[{0: "finished", 75: "preempted"}.get(ended.code, "failed")] == 1
    if ended.code == 75:
        assert f"from step {ended.step} (step_{ended.step:06d})" in ended.why, (
            "75: this very step is on disk"
        )


RESUMED = [
    case
    for case in CASES
    if case.code in (69, 75) and case.name not in ("every checkpoint is damaged",)
]


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_a_run_that_may_go_on_does_so_at_the_next_start(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """69 and 75: what made it end is gone."""
    first = played(case, tmp_path, monkeypatch)
    assert first.code == case.code
    again = simulate(tmp_path, monkeypatch, (), **case.changes)
    assert (again.code, again.why) == (0, "")
    ledger_closes({"in_flight": 0, "ready": 0, **again.counts})
    assert again.step == case.changes.get("steps", 3)
    assert again.counts["trained"] == 8 * again.step


@pytest.mark.parametrize(
    "cause", ["environment raised", "environment hung", "bad data", "network", "bug"]
)
def test_an_episode_is_played_again_elsewhere(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = simulate(tmp_path, monkeypatch, [member(cause, times=1)])
    first, second = (one for one in ended.episodes if (one.task, one.sample) == (BAD[0], ONE[0]))
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.environment != second.environment


def test_an_episode_that_ends_its_actor_takes_the_others_along_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the call that they shared each plays in a call of its own."""
    ended = simulate(tmp_path, monkeypatch, [member("died")])
    assert {len(samples) for _, samples in ended.calls} == {1, 4}
    tries = {
        sample: max(e.attempt for e in ended.episodes if (e.task, e.sample) == (BAD[0], sample))
        for sample in range(4)
    }
    assert tries == {0: 1, 1: 3, 2: 1, 3: 1}


def test_a_request_is_sent_again_to_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The episode goes on: nothing of it is played again."""
    ended = simulate(tmp_path, monkeypatch, [once("generate", "died")])
    assert {episode.attempt for episode in ended.episodes} == {0}
    [lost] = ended.named("worker_lost")
    assert lost["role"] == "rollout"
    assert "a request of episode" in lost["why"]


def test_a_stall_is_reported_before_it_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = played(BY_NAME["nothing moves"], tmp_path, monkeypatch)
    assert [event["awaited"].partition(" for ")[0] for event in ended.named("stalled")] == [
        "train of policy rank 0"
    ] * 2
    assert ended.code == 69


def test_a_lost_node_is_named_with_what_was_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = played(BY_NAME["a node costs one unit"], tmp_path, monkeypatch)
    [lost] = ended.named("node_lost")
    assert lost["roles"] == {"rollout": 1, "environment": 1, "reward": 1}
    assert lost["node"] == "b"


def test_what_a_failed_run_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bug its traceback, and of each end what a resume starts from."""
    ended = played(BY_NAME["train of a rank: bug"], tmp_path, monkeypatch)
    [failed] = ended.named("failed")
    assert "KeyError" in failed["traceback"]
    assert failed["saved"].endswith(
        "step 1 is saved; run again to continue from step 1 (step_000001)"
    )
