"""Whether the policy's nodes and the driver's see the same run folder, found out before the first
step.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rayloop.actors.policy import PolicyRank
from rayloop.cluster.supervision import policy_group
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core.failures import ConfigError
from rayloop.run.sections import PolicySettings
from tests.support.local import LocalActor


class DoesNotSee(PolicyRank):
    """Its node has a disk of its own where the run folder should be."""

    def shares(self, probe: str, within: float) -> str | None:
        return super().shares(f"{probe} of its own", within)


class IsNotSeen(PolicyRank):
    """Its node has a copy, or mounts the folder in a way that keeps what is written to itself."""

    def shares(self, probe: str, within: float) -> str | None:
        return None


@pytest.mark.parametrize("second", [PolicyRank, DoesNotSee, IsNotSeen])
def test_an_output_that_a_rank_does_not_share_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: type[PolicyRank]
) -> None:
    monkeypatch.setattr(policy_group, "SHARED_FILE_TIMEOUT_S", 0.2)
    made: list[Any] = [
        LocalActor(kind(None, rank, 2)) for rank, kind in enumerate((PolicyRank, second))
    ]  # type: ignore[arg-type]
    group = PolicyGroup(PolicySettings(ranks=2), lambda rank: made[rank])
    group.ranks = made
    if second is PolicyRank:
        asyncio.run(group.check_shared(tmp_path / "run"))
    else:
        with pytest.raises(
            ConfigError,
            match=r"output: .*/run is not shared by the nodes of the policy \(.+\), which",
        ):
            asyncio.run(group.check_shared(tmp_path / "run"))
    assert not list((tmp_path / "run").iterdir())
