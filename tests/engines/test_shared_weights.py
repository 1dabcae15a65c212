"""The file in memory that vLLM's workers read: written once for the engines of a node, also when
one of them is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayloop.core.failures import WeightSyncError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.engines.generation import vllm_worker
from rayloop.engines.generation.vllm_worker import VllmWorker, written
from rayloop.transports.manifest import manifest

TENSORS = {"a": torch.arange(100.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}


def sent(step: int, tensors: dict[str, torch.Tensor] = TENSORS) -> Manifest:
    return manifest(Version(0, step), tensors)


@pytest.fixture
def meeting(tmp_path: Path) -> str:
    return str(tmp_path / "weights")


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each tensor that was written."""
    found: list[int] = []

    def raw(tensor: torch.Tensor) -> Any:
        found.append(tensor.nbytes)
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()

    monkeypatch.setattr(vllm_worker, "raw", raw)
    return found


class Worker(VllmWorker):
    """Keeps what it would load."""

    def _load(self, version: Version, weights: Any) -> None:
        self.loaded = dict(weights)


def arrives(file: int, of: Manifest) -> bool:
    """Whether a worker finds the tensors at the path, by their checksums."""
    worker = Worker()
    assert worker.take_weights(f"/proc/{os.getpid()}/fd/{file}", pickle.dumps(of)) == b""
    return all(torch.equal(worker.loaded[name], tensor) for name, tensor in TENSORS.items())


def test_engines_of_a_node_write_a_version_once(meeting: str, writes: list[int]) -> None:
    files = [written(meeting, sent(1), TENSORS) for _ in range(3)]
    assert writes == [400, 30]
    assert all(arrives(file, sent(1)) for file in files)
    os.close(files[0])
    assert arrives(files[1], sent(1)), "it stays while one has it open"
    later = written(meeting, sent(2), TENSORS)
    assert writes == [400, 30] * 2, "another version is another file"
    for file in (*files[1:], later):
        os.close(file)
    os.close(written(meeting, sent(2), TENSORS))
    assert writes == [400, 30] * 3, "the file is gone when all have closed it"


def test_a_number_that_belongs_to_another_file_by_now_is_not_read(
    meeting: str, writes: list[int]
) -> None:
    first = written(meeting, sent(1), TENSORS)
    other = os.memfd_create("other")
    os.dup2(other, first)
    again = written(meeting, sent(1), TENSORS)
    assert writes == [400, 30] * 2
    assert arrives(again, sent(1))
    for file in (first, other, again):
        os.close(file)


def memories() -> list[str]:
    """The files with weights that this process has open; threads of other libraries open and close
    files of their own.
    """
    links = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{file}"))
    return sorted(link for link in links if link.startswith("/memfd:weights-"))


def test_an_engine_that_is_killed_leaves_what_others_have_open(
    meeting: str, writes: list[int]
) -> None:
    context = multiprocessing.get_context("fork")
    ready, never = context.Event(), context.Event()

    def run() -> None:
        written(meeting, sent(1), TENSORS)
        ready.set()
        never.wait(60)

    writer = context.Process(target=run)
    writer.start()
    assert ready.wait(30)
    file = written(meeting, sent(1), TENSORS)
    assert writes == [], "the other process wrote it"
    writer.kill()
    writer.join()
    assert arrives(file, sent(1))
    os.close(file)
    os.close(written(meeting, sent(1), TENSORS))
    assert writes == [400, 30]


def test_what_cannot_be_written_holds_up_nobody(
    meeting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeightSyncError, match="b: missing"):
        written(meeting, sent(1), {"a": TENSORS["a"]})
    before = memories()
    with monkeypatch.context() as patch:
        patch.setattr(vllm_worker, "raw", lambda tensor: np.zeros(2)[5])
        with pytest.raises(IndexError):
            written(meeting, sent(1), TENSORS)
    assert memories() == before
    file = written(meeting, sent(1), TENSORS)
    assert arrives(file, sent(1))
    os.close(file)
