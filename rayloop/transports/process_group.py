"""A process group beside torch's default one. Only this module calls torch's undocumented constructors of groups."""

import os
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

RAISING = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""NCCL's constructor reads these. Without them PyTorch's watchdog ends the process of a failed or late broadcast: no exception."""
CONSTRUCTING = threading.Lock()
LOOK = 0.05
"""Seconds between two checks of which members have joined."""


class Membership:
    """This process's membership in a group whose first member broadcasts. ``join`` leaves the previous group. A member that notices
    a failure leaves; its closed connections fail the broadcasts of the others. No wait exceeds ``timeout`` seconds."""

    def __init__(self, backend: Literal["gloo", "nccl"], timeout: float) -> None:
        self._backend, self._timeout = backend, timedelta(seconds=timeout)
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        """Device of the tensors to broadcast."""
        self._server: dist.TCPStore | None = None
        self._group: dist.Backend | None = None
        self._name: str | None = None

    def serve(self, host: str) -> int:
        """Open the TCP store where members find each other, if it is not open. Returns its port at ``host``."""
        if self._server is None:
            self._server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return int(self._server.port)

    def join(self, host: str, port: int, name: str, size: int) -> None:
        """Become one of ``size`` members of the group ``name``; the process that called ``serve`` is rank 0. Raises RuntimeError
        when the others do not join in time, or the group is full. All wait at the store: NCCL's constructor has no deadline."""
        if self._group is not None and name == self._name:
            return
        self.leave()
        store = dist.PrefixStore(name, self._server or dist.TCPStore(host, port, is_master=False, timeout=self._timeout))
        rank = 0 if self._server else store.add("joined", 1)
        if rank >= size:
            raise RuntimeError(f"{rank} receivers came to a meeting of {size - 1}")
        self._meet(store, rank, size)
        form = _nccl if self._backend == "nccl" else dist.ProcessGroupGloo
        self._group, self._name = form(store, rank, size, self._timeout), name

    def _meet(self, store: dist.Store, rank: int, size: int) -> None:
        """Rank 0 waits for the others at the store, then releases all. Raises RuntimeError after ``timeout``."""
        if rank:
            store.set(f"came/{rank}", "")
            store.wait(["begin"], self._timeout)
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (came := sum(store.check([f"came/{other}"]) for other in range(1, size))) < size - 1:
            if time.monotonic() > deadline:
                within = self._timeout.total_seconds()
                raise RuntimeError(f"{came} of {size - 1} receivers came to the meeting within {within:g} s")
            time.sleep(LOOK)
        store.set("begin", "")

    def broadcast(self, buffer: Tensor) -> None:
        """Copy rank 0's buffer into the others' buffers. Raises RuntimeError when a member is gone or late."""
        assert self._group is not None
        self._group.broadcast(buffer, 0).wait(self._timeout)

    def leave(self) -> None:
        """Close the connections to the other members."""
        self._group = self._name = None


def _nccl(*arguments: Any) -> Any:
    """Returns an NCCL group. Only its constructor sees ``RAISING``, so the trainer's groups keep their behaviour."""
    with CONSTRUCTING:
        before = {name: os.environ.get(name) for name in RAISING}
        os.environ |= RAISING
        try:
            return dist.ProcessGroupNCCL(*arguments)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
