"""Weights from process to process without Ray: what a group of NCCL does when a member does not
come.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from benchmarks.gpu.children import CONTEXT, Child
from benchmarks.gpu.result import Found, Place

Backend = Literal["gloo", "nccl"]
MEMBER_TIMEOUT_S = 10.0
"""Seconds that a member waits, as in a broadcast of weights."""
HANGING_AFTER_S = 90.0
"""Seconds after which a member that still waits counts as hanging."""


def probe(place: Place) -> Found:
    """Each case in processes of its own, gloo on a CPU. With one GPU, NCCL refuses two members: it
    says so within its deadline.
    """
    import torch

    gpu = torch.cuda.is_available()
    backend: Backend = "nccl" if gpu else "gloo"
    mib = 8 if place.tiny else 1024
    timeout = 30.0 if place.tiny else MEMBER_TIMEOUT_S  # a busy CPU starts the second process late
    yield "backend", backend
    yield "a group of one", Child(alone, backend, timeout, mib).answer(HANGING_AFTER_S)
    yield (
        "the second of two never comes",
        Child(in_vain, backend, 1.0 if place.tiny else MEMBER_TIMEOUT_S).answer(HANGING_AFTER_S),
    )
    yield "two members", _two(backend, timeout, mib, dies=False)
    yield "the second member dies before the broadcast", _two(backend, timeout, mib, dies=True)


def alone(backend: Backend, timeout: float, mib: int) -> dict[str, float]:
    """Seconds in which a group of one is made, and in which it broadcasts."""
    import torch

    from rayloop.transports.process_group import Membership

    began = time.perf_counter()
    member = Membership(backend)
    port = member.serve("127.0.0.1", timeout)
    member.join("127.0.0.1", port, "alone", 1, timeout)
    made = time.perf_counter()
    member.broadcast(torch.zeros(mib << 20, dtype=torch.uint8, device=member.device))
    return {"made_s": round(made - began, 3), "broadcast_s": round(time.perf_counter() - made, 3)}


def in_vain(backend: Backend, timeout: float) -> None:
    """Wait for a second member: raises what a policy's first rank would see."""
    from rayloop.transports.process_group import Membership

    member = Membership(backend)
    port = member.serve("127.0.0.1", timeout)
    member.join("127.0.0.1", port, "in vain", 2, timeout)


def first(backend: Backend, timeout: float, mib: int, other: Any) -> dict[str, float]:
    """Be the one whose bytes are sent, and say how long each of two broadcasts took.

    ``other``: a pipe to the second.
    """
    import torch

    from rayloop.transports.process_group import Membership

    member = Membership(backend)
    port = member.serve("127.0.0.1", timeout)
    other.send(port)
    member.join("127.0.0.1", port, "two", 2, timeout)
    time.sleep(min(2.0, timeout / 2))  # time to die for the other
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        member.broadcast(torch.ones(mib << 20, dtype=torch.uint8, device=member.device))
        seconds.append(round(time.perf_counter() - began, 3))
    return {
        "first_s": seconds[0],
        "second_s": seconds[1],
        "gb_per_s": round((mib << 20) / 1e9 / seconds[1], 3),
    }


def second(backend: Backend, timeout: float, mib: int, other: Any, dies: bool) -> bool:
    """Receive two broadcasts, on another GPU if there is one.

    Returns whether the bytes are right.
    """
    import os

    import torch

    from rayloop.transports.process_group import Membership

    if not other.poll(HANGING_AFTER_S):
        raise TimeoutError("the first member did not say where it is")
    if backend == "nccl":
        torch.cuda.set_device(torch.cuda.device_count() - 1)
    member = Membership(backend)
    member.join("127.0.0.1", other.recv(), "two", 2, timeout)
    if dies:
        os.abort()
    for _ in range(2):
        buffer = torch.zeros(mib << 20, dtype=torch.uint8, device=member.device)
        member.broadcast(buffer)
    return bool((buffer == 1).all())


def _two(backend: Backend, timeout: float, mib: int, dies: bool) -> dict[str, Any]:
    here, there = CONTEXT.Pipe()
    members = {
        "first": Child(first, backend, timeout, mib, here),
        "second": Child(second, backend, timeout, mib, there, dies),
    }
    return {name: member.answer(HANGING_AFTER_S) for name, member in members.items()}
