"""The ranks of the policy meet, also when somebody takes every port that was free a moment ago."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch

from rayloop.actors.policy import PolicyRank, RankSettings
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core.failures import WorkerStartFailed
from rayloop.engines.training.sharding import meeting_place
from rayloop.run.config import RunConfig
from tests.support.heads import free_ports
from tests.support.local import LocalActor
from tests.support.runs import settings


class Crowded(PolicyRank):
    """Somebody else wants the port as soon as it is announced."""

    def address(self) -> Any:
        found = super().address()
        if found is not None and found.port:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((found.host, found.port))
        return found


def start(ranks: int, tmp_path: Path, model: Path) -> list[Crowded]:
    torch.set_num_threads(1)
    c = RunConfig.model_validate(settings(tmp_path, model))
    made = RankSettings(
        c.model, c.policy.engine, c.policy.optimizer, c.policy.loss, c.transport, str(tmp_path), 0
    )
    policy = PolicyGroup(c.policy, lambda rank: LocalActor(Crowded(made, rank, ranks)))
    asyncio.run(policy.start())
    return [rank.actor for rank in policy.ranks]


def test_a_rank_without_others_listens_nowhere(
    tmp_path: Path, digits_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    before = set(psutil.Process().net_connections("tcp"))
    [rank] = start(1, tmp_path, digits_model)
    try:
        assert "language" in rank.engine.parameter_groups()
        opened = set(psutil.Process().net_connections("tcp")) - before
        assert not [
            one
            for one in opened
            if one.status == psutil.CONN_LISTEN and one.laddr.ip != "127.0.0.1"
        ]
    finally:
        rank.engine.close()


def test_a_port_that_was_announced_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    rank = Crowded(SimpleNamespace(), 0, 2)  # type: ignore[arg-type]
    invited = rank.address()
    assert invited.port
    assert invited.secret not in repr(invited)


def test_a_place_that_cannot_be_had_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            WorkerStartFailed,
            match=f"127.0.0.1:{port} where the policy's ranks meet cannot be opened",
        ):
            meeting_place(("127.0.0.1", port), 5, first=True)
    with pytest.raises(WorkerStartFailed, match="cannot be reached"):
        meeting_place(("127.0.0.1", *free_ports(1)), 1, first=False)
