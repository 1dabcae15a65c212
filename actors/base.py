"""The base of all actors: its debug methods, and how it treats child processes and GPUs."""

import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any, Self

import ray

GROUPS = {"debug": 1, "background": 1}
"""Ray's concurrency groups of every actor, a thread each.

``debug`` answers when others hang, ``background`` waits for work.
"""


def dump() -> str:
    """The stacks of this process's threads, without the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"pid {os.getpid()}"]
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            name = names.get(ident, ident)
            stack = "".join(traceback.format_stack(frame)).rstrip()
            parts.append(f"thread {name}\n{stack}")
    return "\n\n".join(parts)


class Actor:
    """Base of all actors."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Let the process see the exit codes of its children, and hide GPUs of other processes."""
        # A subreaper (rayloop/launch/ray_variables.py) ignores SIGCHLD, so every child would seem
        # to end with code 0. Through libc, since Ray may create an actor outside of the main
        # thread, where Python refuses.
        ctypes.CDLL(None).signal(signal.SIGCHLD, ctypes.c_void_p(None))
        if ray.is_initialized() and not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
            # Otherwise the process takes memory that vLLM counts as free.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return super().__new__(cls)

    @ray.method(concurrency_group="debug")
    def host(self) -> str:
        """The machine's name: actors on the same machine share its cores."""
        return socket.gethostname()

    @ray.method(concurrency_group="debug")
    def node(self) -> str:
        """Ray's id of the actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="debug")
    def awaits(self) -> list[tuple[str, Any]]:
        """The waits of its calls for other actors; answers when others hang.

        Each has a text, and the handle of the actor that must answer, or None.
        """
        return []

    @ray.method(concurrency_group="debug")
    def stacks(self) -> str:
        """The stacks of all threads; answers when every other call hangs."""
        return dump()
