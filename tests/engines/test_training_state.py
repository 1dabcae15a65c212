"""A trainer's state on disk: tensors of every kind come back, and whatever else the files hold runs no code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from rayloop.core.failures import CheckpointError, CheckpointStorageFailed
from rayloop.engines.training import state

KINDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def tensors(fill: int) -> dict[str, Any]:
    """One of each type, nested, and one without a dimension."""
    found = {str(kind): torch.full((3, 2), fill, dtype=kind) for kind in KINDS}
    return {"parameters": found, "updates": torch.tensor(7 * fill)}


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    folder = str(tmp_path)
    state.save(folder, tensors(1), 0)
    drawn, loaded = torch.rand(3), tensors(0)
    state.load(folder, loaded, 0)
    assert int(loaded["updates"]) == 7
    assert all(bool((tensor == 1).all()) for tensor in loaded["parameters"].values())
    assert torch.equal(torch.rand(3), drawn), "the random state of the moment when it was saved"


def test_a_disk_that_refuses_is_told_from_what_is_wrong_with_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state._Counted, "write", full)
    with pytest.raises(CheckpointStorageFailed, match=r"^.*cannot be written: \[Errno 28\] No space left on device$"):
        state.save(str(tmp_path), tensors(1), 0)
    with pytest.raises(CheckpointError) as missing:
        state.load(str(tmp_path / "nothing"), tensors(0), 0)
    assert type(missing.value) is CheckpointError


class Runs:
    """What a pickle can do to who reads it."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sign),)


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    folder, sign = tmp_path / "trainer", tmp_path / "it ran"
    state.save(str(folder), tensors(1), 0)
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(sign)))
    with pytest.raises(CheckpointError, match=r"its index names posix\.mkdir, which no index of tensors does"):
        state.load(str(folder), tensors(0), 0)
    assert not sign.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert sign.exists(), "the pickle must be able to do harm"


def test_values_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    """Torch would load each of them as a pickle of its own."""
    dcp.save({"updates": torch.tensor(1), "name": Path("x")}, checkpoint_id=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"its index names .*BytesStorageMetadata"):
        state.load(str(tmp_path), {"updates": torch.tensor(0), "name": None}, 0)


@pytest.mark.parametrize("index", [b"", b"\x80\x05\x95", b".garbage"], ids=["empty", "cut", "noise"])
def test_a_broken_index_is_a_broken_checkpoint(index: bytes, tmp_path: Path) -> None:
    state.save(str(tmp_path), tensors(1), 0)
    (tmp_path / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointError, match="the trainer's state cannot be read"):
        state.load(str(tmp_path), tensors(0), 0)
