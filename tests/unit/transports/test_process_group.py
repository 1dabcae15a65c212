"""The constructor of NCCL's groups, which is told here what NCCL does not agree upon by itself.

Nothing of NCCL runs.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from rayloop.transports.process_group import RAISING, _nccl

PINNED = {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "Simple"}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str | None]]:
    """The environment that the constructor saw."""
    found: list[dict[str, str | None]] = []
    names = (*RAISING, *PINNED)
    monkeypatch.setattr(
        dist,
        "ProcessGroupNCCL",
        lambda *_: found.append({name: os.environ.get(name) for name in names}),
        raising=False,
    )
    return found


def test_a_group_with_vllms_processes_is_made_without_what_vllm_pins(
    seen: list[dict[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)

    @contextmanager
    def unpinned_nccl_env() -> Iterator[None]:
        for name in PINNED:
            del os.environ[name]
        yield
        os.environ.update(PINNED)

    module = types.ModuleType("vllm.utils.nccl")
    module.unpinned_nccl_env = unpinned_nccl_env  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _nccl("store", 0, 2, None)
    assert seen == [{**RAISING, **dict.fromkeys(PINNED)}]
    assert {name: os.environ[name] for name in PINNED} == PINNED
    assert not RAISING.keys() & os.environ.keys()


def test_without_vllm_nothing_is_changed_but_what_makes_it_raise(
    seen: list[dict[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm.utils.nccl", raising=False)
    monkeypatch.setenv("NCCL_ALGO", "ring")
    _nccl("store", 0, 2, None)
    assert seen == [{**RAISING, "NCCL_ALGO": "ring", "NCCL_PROTO": None}]
