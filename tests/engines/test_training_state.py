"""A trainer's state on disk: tensors of every kind come back, and whatever else the files hold runs
no code.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

from rayloop.core.failures import CheckpointError, CheckpointStorageFailed
from rayloop.engines.training import index, state
from rayloop.engines.training.index import Piece, TensorEntry, read, write

OLD = Path(__file__).parents[1] / "data/checkpoints/schema_2/trainer"
"""``tensors(1)`` with 7 updates, as torch.distributed.checkpoint wrote them; ``.metadata.3_11_2``
as Python 3.11.2 pickles it, and ``.metadata.3_13_5`` as 3.13.5 does.
"""
KINDS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


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


def test_a_disk_that_refuses_is_not_what_is_wrong_with_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state._Writer, "_write", full)
    with pytest.raises(
        CheckpointStorageFailed,
        match=r"^.*cannot be written: \[Errno 28\] No space left on device$",
    ):
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


@pytest.mark.parametrize(
    "name", [".metadata", "__0.metadata", "random_0.pt", "random_0.safetensors", "index.json"]
)
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path, name: str) -> None:
    """Torch takes ``__0.metadata`` where ``.metadata`` is none that it can use."""
    folder, sign = tmp_path / "trainer", tmp_path / "it ran"
    shutil.copytree(OLD, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(torch.Size([])))
    (folder / name).write_bytes(pickle.dumps(Runs(sign)))
    with pytest.raises(CheckpointError, match="the trainer's state cannot be read"):
        state.load(str(folder), tensors(0), 0)
    assert not sign.exists()
    pickle.loads((folder / name).read_bytes())
    assert sign.exists(), "the pickle must be able to do harm"


def test_values_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    """Torch would load each of them as a pickle of its own."""
    values = {"updates": torch.tensor(1), "name": Path("x")}
    dcp.save(values, checkpoint_id=str(tmp_path / "old"))
    with pytest.raises(CheckpointError, match=r"its index names .*BytesStorageMetadata"):
        state.load(str(tmp_path / "old"), {"updates": torch.tensor(0), "name": None}, 0)
    with pytest.raises(CheckpointError, match="name is not a tensor"):
        state.save(str(tmp_path / "new"), values, 0)


@pytest.mark.parametrize("written_by", ["3.11.7", "3.11.2", "3.13.5"])
def test_checkpoints_of_schema_2_are_read_whichever_python_wrote_their_index(
    tmp_path: Path, written_by: str
) -> None:
    """Until 3.11.3 an enumeration was pickled as ``getattr(class, name)``, later as
    ``class(value)``; 3.13 moved pathlib.
    """
    folder = tmp_path / "trainer"
    shutil.copytree(OLD, folder)
    if written_by != "3.11.7":
        shutil.move(folder / f".metadata.{written_by.replace('.', '_')}", folder / ".metadata")
    pickled = (folder / ".metadata").read_bytes()
    assert (b"getattr" in pickled, b"pathlib._local" in pickled) == (
        written_by == "3.11.2",
        written_by == "3.13.5",
    )
    assert_filled(folder)


def test_a_checkpoint_of_another_minor_version_of_python_is_read() -> None:
    """``tensors(1)`` with 7 updates, written by ``save`` of this project under Python 3.13.5 and
    torch 2.14.1.
    """
    assert_filled(OLD.parents[1] / "schema_3/trainer")


def assert_filled(folder: Path) -> None:
    loaded = tensors(0)
    state.load(str(folder), loaded, 0)
    assert int(loaded["updates"]) == 7
    assert all(bool((tensor == 1).all()) for tensor in loaded["parameters"].values())


def test_an_index_says_the_same_on_every_python(tmp_path: Path) -> None:
    """It is plain JSON: an interpreter without torch reads what this one wrote."""
    state.save(str(tmp_path), tensors(1), 0)
    found = json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))["tensors"][
        "parameters.torch.bfloat16"
    ]
    piece = found["pieces"][0]
    content = (tmp_path / piece["file"]).read_bytes()[
        piece["offset"] : piece["offset"] + piece["bytes"]
    ]
    assert (found["dtype"], found["shape"], piece["at"], piece["shape"]) == (
        "bfloat16",
        [3, 2],
        [0, 0],
        [3, 2],
    )
    assert (content, piece["crc32"]) == (b"\x80\x3f" * 6, zlib.crc32(content))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("form"),
        lambda index: index.update(tensors=[]),
        lambda index: index["tensors"]["updates"].update(dtype="complex64"),
        lambda index: index["tensors"]["updates"].update(dtype="Size"),
        lambda index: index["tensors"]["updates"].update(shape=[2]),
        lambda index: index["tensors"]["updates"].update(pieces=[]),
        lambda index: index["tensors"]["updates"]["pieces"][0].update(file="../rank_0.bin"),
        lambda index: index["tensors"]["updates"]["pieces"][0].update(bytes=2**40),
        lambda index: index["tensors"]["updates"]["pieces"][0].update(offset=-1),
        lambda index: index["tensors"]["updates"]["pieces"][0].update(crc32=None),
        lambda index: index["tensors"]["updates"]["pieces"][0].pop("at"),
        lambda index: index["tensors"]["parameters.torch.float32"]["pieces"][0].update(at=[1, 0]),
        lambda index: index["tensors"]["parameters.torch.float32"]["pieces"][0].update(shape=[3]),
    ],
)
def test_an_index_that_does_not_fit_its_tensors_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    state.save(str(tmp_path), tensors(1), 0)
    index = json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))
    change(index)
    (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"the trainer's state cannot be read: (its index|it is not an index)"
    ):
        state.load(str(tmp_path), tensors(0), 0)


def rectangles(*pieces: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]) -> bytes:
    """The index of one tensor with a piece for each ``(at, shape)``."""
    made = tuple(
        Piece(at, size, f"rank_{rank}.bin", 0, math.prod(size), 0)
        for rank, (at, size) in enumerate(pieces)
    )
    return write({"weight": TensorEntry("uint8", shape, made)})


@pytest.mark.parametrize(
    ("pieces", "shape"),
    [
        ([((0,), (4,)), ((2,), (4,))], (8,)),
        ([((0,), (4,)), ((3,), (0,)), ((2,), (4,))], (8,)),
        ([((0,), (6,)), ((1,), (1,)), ((3,), (1,))], (8,)),
        ([((0, 0), (2, 2)), ((1, 1), (2, 2)), ((2, 0), (1, 1))], (3, 3)),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], (4, 4)),
    ],
)
def test_pieces_that_overlap_leave_a_gap_and_are_refused(
    pieces: Any, shape: tuple[int, ...]
) -> None:
    """Their sizes add up to the tensor's, and what no piece holds would keep the values of the
    start model.
    """
    assert sum(math.prod(size) for _, size in pieces) == math.prod(shape)
    with pytest.raises(
        ValueError, match="its index has values of weight twice, and others not at all"
    ):
        read(rectangles(*pieces, shape=shape))


@pytest.mark.parametrize(
    ("pieces", "shape"),
    [
        ([((4,), (4,)), ((0,), (4,)), ((8,), (0,))], (8,)),
        ([((0, 0), (4, 2)), ((0, 2), (4, 2))], (4, 4)),
        (
            [
                ((0, 0), (1, 2)),
                ((0, 2), (2, 1)),
                ((2, 1), (1, 2)),
                ((1, 0), (2, 1)),
                ((1, 1), (1, 1)),
            ],
            (3, 3),
        ),
    ],
)
def test_pieces_that_only_touch_are_read(pieces: Any, shape: tuple[int, ...]) -> None:
    assert len(read(rectangles(*pieces, shape=shape))["weight"].pieces) == len(pieces)


@pytest.mark.parametrize("wide", [0, 1])
def test_the_pieces_of_many_ranks_are_not_compared_each_with_each(
    monkeypatch: pytest.MonkeyPatch, wide: int
) -> None:
    ranks, compared, meet = 1000, list[int](), index._meet

    def counted(one: Piece, other: Piece, axis: int) -> bool:
        compared.append(axis)
        return meet(one, other, axis)

    monkeypatch.setattr(index, "_meet", counted)
    pieces = [
        ((rank, 0) if wide == 0 else (0, rank), (1, 3) if wide == 0 else (3, 1))
        for rank in range(ranks)
    ]
    read(rectangles(*pieces, shape=(ranks, 3) if wide == 0 else (3, ranks)))
    assert len(compared) <= 2 * ranks


def test_the_folder_is_synced_after_its_last_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not take the name of a file whose checksum the driver has."""
    known = list[set[str]]()

    def record(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            known.append({file.name for file in tmp_path.iterdir()})

    monkeypatch.setattr(os, "fsync", record)
    sums = state.save(str(tmp_path), tensors(1), 0)
    assert known[-1] == sums.keys() == {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "index", [b"", b"\x80\x05\x95", b".garbage"], ids=["empty", "cut", "noise"]
)
def test_a_broken_index_is_a_broken_checkpoint(index: bytes, tmp_path: Path) -> None:
    state.save(str(tmp_path), tensors(1), 0)
    (tmp_path / "index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match="the trainer's state cannot be read"):
        state.load(str(tmp_path), tensors(0), 0)


@pytest.mark.parametrize(
    "found",
    [
        "a text",
        [1],
        {"cpu": "a text", "cuda": []},
        {"cpu": None, "cuda": []},
        {"cpu": torch.get_rng_state(), "cuda": 3},
        {"cpu": torch.zeros(5056), "cuda": []},
    ],
    ids=["a text", "a list", "text for cpu", "None for cpu", "a number for cuda", "floats for cpu"],
)
def test_random_states_of_another_form_are_a_broken_checkpoint(tmp_path: Path, found: Any) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(OLD, old)
    torch.save(found, old / "random_0.pt")
    state.save(str(new), tensors(1), 0)
    (new / "random_0.safetensors").write_bytes(save({"cpu": torch.zeros(5056)}))
    for folder in (old, new):
        with pytest.raises(CheckpointError, match="the trainer's state cannot be read"):
            state.load(str(folder), tensors(0), 0)


def test_an_archive_of_the_oldest_form_is_a_broken_checkpoint(tmp_path: Path) -> None:
    """Before version 0.1 torch wrote tar files of pickles."""
    shutil.copytree(OLD, tmp_path / "old")
    with tarfile.open(tmp_path / "old/random_0.pt", "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(CheckpointError, match="the trainer's state cannot be read"):
        state.load(str(tmp_path / "old"), tensors(0), 0)
