"""What a run asks of a cluster: the object store holds the weight updates that exist at once, as
far as the memory goes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayloop.launch.ray_variables import OBJECT_STORE_BYTES
from rayloop.run.demand import store, store_wanted

GIB = 2**30
PARAMETERS = 3_750_000_000
"""Of Qwen2.5-VL-3B, which one step published into 512 MiB before: Ray wrote it to a disk and read
it again.
"""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    usage = SimpleNamespace(free=100 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return usage


def test_the_store_has_room_for_two_weight_updates_and_a_half(
    tmp_path: Path, free: SimpleNamespace
) -> None:
    assert store("bfloat16", PARAMETERS, tmp_path) == OBJECT_STORE_BYTES + 5 * PARAMETERS


def test_float32_weights_take_twice_as_much(tmp_path: Path, free: SimpleNamespace) -> None:
    assert store("float32", PARAMETERS, tmp_path) == OBJECT_STORE_BYTES + 10 * PARAMETERS


def test_it_takes_no_more_than_the_shared_memory_has(tmp_path: Path, free: SimpleNamespace) -> None:
    free.free = 10 * GIB
    assert store("bfloat16", PARAMETERS, tmp_path) == 9 * GIB
    free.free = 64 * 2**20
    assert store("bfloat16", PARAMETERS, tmp_path) == OBJECT_STORE_BYTES
    assert store("bfloat16", PARAMETERS, tmp_path / "none") == OBJECT_STORE_BYTES


def test_weights_that_are_not_here_need_no_room() -> None:
    assert store_wanted("bfloat16", 0) == OBJECT_STORE_BYTES
