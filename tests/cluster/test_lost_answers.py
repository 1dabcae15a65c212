"""Two real ranks, of which one cannot be reached for a moment: no call of both is run twice, and
the policy is not rebuilt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError

from rayloop.actors.base import GROUPS
from rayloop.actors.policy import PolicyRank, RankSettings
from rayloop.cluster.supervision import policy_group
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core.types import Version
from rayloop.run.config import RunConfig
from tests.support.clusters import private_ray
from tests.support.runs import settings

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow_faults]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with private_ray(4):
        yield


def test_answers_that_are_lost_cost_no_rebuild(
    tmp_path: Path, digits_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank answers, and its first answer to each call is lost: the first rank has left
    the collective by then.
    """
    c = RunConfig.model_validate(settings(tmp_path, digits_model, policy__ranks=2))
    made = RankSettings(
        c.model, c.trainer, c.optimizer, c.policy.loss, c.transport, str(tmp_path), 0
    )
    rank = ray.remote(concurrency_groups=GROUPS)(PolicyRank)
    policy = PolicyGroup(c.policy, lambda number: rank.options(num_cpus=1).remote(made, number, 2))
    with_deadline, lost = policy_group.with_deadline, list[str]()

    async def losing(within: float, awaitable: Any, what: str, *options: Any, **more: Any) -> Any:
        answer = await with_deadline(within, awaitable, what, *options, **more)
        if what.endswith("rank 1") and what not in lost:
            lost.append(what)
            raise ActorUnavailableError("connection reset", b"1" * 16)
        return answer

    async def calls() -> tuple[Any, Any]:
        await policy.start()
        monkeypatch.setattr(policy_group, "with_deadline", losing)
        before = await policy.export(Version(0, 1))
        (tmp_path / "state").mkdir()
        sums = await policy.save(str(tmp_path / "state"))
        await policy.all(PolicyRank.perturb, "language")
        await policy.all(PolicyRank.restore_parameters)
        await policy.load(str(tmp_path / "state"), sums)
        return before, await policy.export(Version(0, 2))

    try:
        before, after = asyncio.run(calls())
        first, second = ray.get([before.source, after.source])
    finally:
        policy.stop()
    names = ("export", "save", "perturb", "restore_parameters", "load")
    assert lost == [f"{name} of policy rank 1" for name in names]
    assert first.keys() == second.keys()
    assert [name for name in first if not np.array_equal(first[name], second[name])] == []
