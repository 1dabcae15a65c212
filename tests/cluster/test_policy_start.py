"""The ranks of the policy meet, also when somebody takes every port that was free a moment ago."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

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
    """Somebody else binds the port as soon as it is announced."""

    def address(self) -> Any:
        found = super().address()
        self.taken = socket.socket()
        _, port = found if isinstance(found, tuple) else str(found).removeprefix("tcp://").split(":")
        try:
            self.taken.bind(("", int(port)))
            self.taken.listen()
        except OSError:
            self.kept = True
        return found


def test_a_port_that_was_announced_cannot_be_taken(tmp_path: Path, digits_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    c = RunConfig.model_validate(settings(tmp_path, digits_model))
    made = RankSettings(c.model, c.policy.engine, c.policy.optimizer, c.policy.loss, c.transport, str(tmp_path), 0)
    policy = PolicyGroup(c.policy, lambda rank: LocalActor(Crowded(made, rank, 1)))
    asyncio.run(policy.start())
    rank = policy.ranks[0].actor
    try:
        assert rank.kept
        assert "language" in rank.engine.parameter_groups()
    finally:
        rank.taken.close()
        rank.engine.close()


def test_a_place_that_cannot_be_had_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(WorkerStartFailed, match=f"127.0.0.1:{port} where the policy's ranks meet cannot be opened"):
            meeting_place(("127.0.0.1", port), 5, first=True)
    with pytest.raises(WorkerStartFailed, match="cannot be reached"):
        meeting_place(("127.0.0.1", *free_ports(1)), 1, first=False)
