"""The resources that the actors of a run reserve, and the object store's size.

They are CPUs, GPUs and all other resources that a cluster counts. Needs no Ray.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from rayloop.config.model import Dtype
from rayloop.launch.ray_variables import OBJECT_STORE_BYTES
from rayloop.run.config import RunConfig
from rayloop.run.sections import Placement

SHARED_MEMORY = Path("/dev/shm")
STORED_UPDATES = 2.5
"""Weight updates that the object store has room for: one is loaded by the last engines while the
next is made.
"""
SHARED_MEMORY_SHARE = 0.9
"""Share of the free shared memory that a private cluster's store may have."""


def demand(config: RunConfig, trains: bool = True) -> list[tuple[str, Placement]]:
    """One entry per actor, in the order of the placement group's bundles.

    An evaluation neither trains nor compares.
    """
    training = [
        ("policy", config.policy.ranks, config.policy.placement),
        (
            "reference",
            config.reference.actors if config.reference_kind == "actor" else 0,
            config.reference.placement,
        ),
    ]
    roles = [
        ("rollout", config.rollout.actors, config.rollout.placement),
        ("environment", config.environment.actors, config.environment.placement),
        ("reward", config.reward.actors, config.reward.placement),
        *(training if trains else ()),
    ]
    return [(role, placement) for role, count, placement in roles for _ in range(count)]


def needs(placement: Placement) -> dict[str, float]:
    """What one actor reserves."""
    bundle = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    # Ray refuses a bundle that reserves nothing.
    return {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}


def bundles(config: RunConfig, trains: bool = True) -> list[dict[str, float]]:
    """What each actor reserves, as Ray's placement groups want it."""
    return [needs(placement) for _, placement in demand(config, trains)]


def total(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each resource over all actors."""
    sums: dict[str, float] = {}
    for bundle in each:
        for name, amount in bundle.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def store_wanted(dtype: Dtype, parameters: int) -> int:
    """Bytes of a private cluster's object store.

    They are the bytes of every run, and the bytes of the weight updates that exist at once.
    ``dtype``: of ``policy.engine``; ``parameters``: of the model.
    """
    update = parameters * (2 if dtype == "bfloat16" else 4)
    return OBJECT_STORE_BYTES + int(STORED_UPDATES * update)


def store(dtype: Dtype, parameters: int, shared_memory: Path = SHARED_MEMORY) -> int:
    """As ``store_wanted``, within the free shared memory.

    Ray writes objects that do not fit to a disk and reads them again.
    """
    room = OBJECT_STORE_BYTES
    if shared_memory.is_dir():
        room = int(SHARED_MEMORY_SHARE * shutil.disk_usage(shared_memory).free)
    return max(OBJECT_STORE_BYTES, min(store_wanted(dtype, parameters), room))
