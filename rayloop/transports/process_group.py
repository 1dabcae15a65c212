"""A process group in addition to torch's default one.

Only this module calls torch's undocumented constructors of groups.
"""

import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rayloop.transports.meeting import Meeting

RAISING = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Environment variables that NCCL's constructor reads.

Without them PyTorch's watchdog ends the process of a failed or late broadcast, without an
exception.
"""
_CONSTRUCTOR_LOCK = threading.Lock()


class Membership:
    """This process's membership in a group whose first member broadcasts.

    ``join`` leaves the previous group. A member that notices a failure leaves; its closed
    connections fail the broadcasts of the others.
    """

    def __init__(self, backend: Literal["gloo", "nccl"]) -> None:
        self._backend = backend
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        """Device of the tensors to broadcast."""
        self._served_meeting: Meeting | None = None
        self._group: dist.Backend | None = None
        self._name: str | None = None

    def serve(self, host: str, timeout: float) -> int:
        """Open a meeting of members at ``host``, in place of an earlier one.

        No wait of it exceeds ``timeout`` seconds. Returns its port. Raises OSError and
        RuntimeError.
        """
        self._served_meeting = Meeting(host, 0, timeout, first=True)
        return self._served_meeting.port

    def join(self, host: str, port: int, name: str, size: int, timeout: float) -> None:
        """Become one of ``size`` members of the group ``name``, which is secret.

        From now on no wait exceeds ``timeout`` seconds. The process that called ``serve`` is rank
        0. Raises RuntimeError when the others do not join in time, or the group is full. All
        members wait for each other here: NCCL's constructor has no deadline.
        """
        self._timeout = timedelta(seconds=timeout)
        if self._group is not None and name == self._name:
            return

        # Leaving closes the last group's connections: a member that still waits there fails at
        # once.
        self.leave()
        meeting = self._served_meeting
        if meeting is None:
            meeting = Meeting(host, port, timeout, first=False)
        rank, store = meeting.join(name, size)
        constructor = _nccl if self._backend == "nccl" else dist.ProcessGroupGloo
        self._group = constructor(store, rank, size, self._timeout)
        self._name = name

    def broadcast(self, buffer: Tensor) -> None:
        """Copy rank 0's buffer into the others' buffers.

        Raises RuntimeError when a member has left or is late.
        """
        assert self._group is not None
        options = dist.BroadcastOptions()
        # With a limit for the wait alone, gloo's thread would run until the limit of the group's
        # constructor, and ``leave`` with it.
        options.timeout = self._timeout
        self._group.broadcast([buffer], options).wait(self._timeout)

    def leave(self) -> None:
        """Close the connections to the other members."""
        # The connections close with the last reference to the group.
        self._group = self._name = None


def _nccl(*arguments: Any) -> Any:
    """Return an NCCL group.

    Only its constructor sees ``RAISING``, so the trainer's groups keep their behaviour.
    """
    # The environment belongs to the process: two constructors at once would restore it wrongly.
    with _CONSTRUCTOR_LOCK, _unpinned():
        old_values = {name: os.environ.get(name) for name in RAISING}
        os.environ |= RAISING
        try:
            return dist.ProcessGroupNCCL(*arguments)
        finally:
            for name, value in old_values.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value


def _unpinned() -> AbstractContextManager[Any]:
    """A context in which vLLM does not pin the algorithm and protocol of NCCL.

    With ``VLLM_BATCH_INVARIANT`` it pins them in its processes, in which its module is loaded. The
    trainer does not, and NCCL does not compare them: a group of both would hang without a deadline.
    """
    # It is looked up, not imported: a trainer without vLLM must not load it.
    vllm = sys.modules.get("vllm.utils.nccl")
    unpinned: AbstractContextManager[Any] = vllm.unpinned_nccl_env() if vllm else nullcontext()
    return unpinned
