"""A process group beside torch's default one: the only place with torch's constructors of groups, which it does not document."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor


class Membership:
    """This process's place in a group whose first member broadcasts. A group is left when another one is joined.

    It lives as long as its members: whoever notices a failure leaves, whose closed connections tell the others; no wait is longer
    than ``timeout`` seconds.
    """

    def __init__(self, backend: Literal["gloo", "nccl"], timeout: float) -> None:
        self._backend, self._timeout = backend, timedelta(seconds=timeout)
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        """Where the tensors to broadcast must lie."""
        self._server: dist.TCPStore | None = None
        self._group: dist.Backend | None = None
        self._name: str | None = None

    def serve(self, host: str) -> int:
        """Open the place where members find each other, if it is not open. Returns its port at ``host``."""
        if self._server is None:
            self._server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return int(self._server.port)

    def join(self, host: str, port: int, name: str, size: int) -> None:
        """Be one of ``size`` members of the group ``name``, the first one where the place was opened.

        Raises RuntimeError when the others do not come in time, or were enough without this one.
        """
        if self._group is not None and name == self._name:
            return
        self.leave()
        server = self._server or dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
        store = dist.PrefixStore(name, server)
        rank = 0 if self._server else store.add("joined", 1)
        if rank >= size:
            raise RuntimeError(f"{rank} receivers came to a meeting of {size - 1}")
        form = dist.ProcessGroupNCCL if self._backend == "nccl" else dist.ProcessGroupGloo
        self._group, self._name = form(store, rank, size, self._timeout), name

    def broadcast(self, buffer: Tensor) -> None:
        """From the first member's buffer into the others'. Raises RuntimeError when a member is gone or late."""
        assert self._group is not None
        self._group.broadcast(buffer, 0).wait(self._timeout)

    def leave(self) -> None:
        """Close the connections to the other members."""
        self._group = self._name = None
