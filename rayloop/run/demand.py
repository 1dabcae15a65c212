"""What the actors of a run reserve: CPUs, GPUs and whatever else a cluster counts. Needs no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rayloop.run.config import Placement, RunConfig


def demand(config: RunConfig, trains: bool = True) -> list[tuple[str, Placement]]:
    """One entry per actor, in the order of the placement group's bundles. An evaluation neither trains nor compares."""
    training = [
        ("policy", config.policy.ranks, config.policy.placement),
        ("reference", config.reference.actors if config.reference.kind == "actor" else 0, config.reference.placement),
    ]
    roles = [
        ("rollout", config.rollout.actors, config.rollout.placement),
        ("environment", config.environment.actors, config.environment.placement),
        ("reward", config.reward.actors, config.reward.placement),
        *(training if trains else ()),
    ]
    return [(role, placement) for role, count, placement in roles for _ in range(count)]


def _bundle(placement: Placement) -> dict[str, float]:
    bundle = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    return {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}


def bundles(config: RunConfig, trains: bool = True) -> list[dict[str, float]]:
    """What each actor reserves, as Ray's placement groups want it."""
    return [_bundle(placement) for _, placement in demand(config, trains)]


def total(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each resource over all actors."""
    sums: dict[str, float] = {}
    for bundle in each:
        for name, amount in bundle.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums
