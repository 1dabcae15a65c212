"""Whether the nodes of the policy's ranks and of the driver see the same run folder, found out before the first step."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path

from rayloop.actors.policy import PolicyRank
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core.failures import ConfigError
from rayloop.core.files import appears

SHARED = 30.0
"""Seconds in which a node must see what another one wrote into a folder that they share."""


async def check_shared(policy: PolicyGroup, folder: Path) -> None:
    """Raises ConfigError unless every rank sees what is written into ``folder`` here, and is seen."""
    probe = folder / f".shared-{secrets.token_hex(4)}"
    probe.mkdir(parents=True)
    try:
        unseen = [host for host in await policy.all(PolicyRank.shares, str(probe), SHARED) if host]
        signs = [probe / f"rank-{rank}" for rank in range(len(policy.ranks))]
        if unseen or not all([await asyncio.to_thread(appears, sign, SHARED) for sign in signs]):
            where = ", ".join(dict.fromkeys(unseen or await policy.all(PolicyRank.host)))
            raise ConfigError(
                f"output: {folder} is not shared by the nodes of the policy ({where}), which save their part of each "
                "checkpoint there. Set output=FOLDER to one that all nodes see"
            )
    finally:
        shutil.rmtree(probe, ignore_errors=True)
