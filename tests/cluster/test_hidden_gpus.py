"""An actor sees the GPUs that it was given, and no others of its machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import ray

from rayloop.actors.base import Actor
from rayloop.actors.handles import create, submit


class Looking(Actor):
    def seen(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def _two_gpus() -> Iterator[None]:
    """Ray is given GPUs that are not there; workers inherit the variable, as on a machine whose
    user chose the GPUs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(("gpus", "seen"), [(0, [""]), (0.5, ["0", "1"]), (1, ["0", "1"])])
def test_an_actor_without_a_gpu_sees_none(gpus: float, seen: list[str]) -> None:
    handle = create(Looking, {"num_cpus": 0, "num_gpus": gpus})
    assert ray.get(submit(handle, Looking.seen), timeout=60) in seen
