"""Checkpoints of real trainers whose files change after they were written: each is found and named."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rayloop.core.events import Event
from rayloop.core.failures import CheckpointError, CheckpointStorageFailed
from rayloop.core.files import Checksum
from rayloop.core.incidents import CheckpointDamaged
from rayloop.engines.training import state
from rayloop.run import checkpoint as checkpoints
from rayloop.run import origin
from rayloop.run.checkpoint import MARKER, Checkpoint, CheckpointStore, complete
from rayloop.run.origin import Origin

PAGE = 4096
EIO = OSError(errno.EIO, "Input/output error")


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"layer.{i}": torch.randn(64, 64, generator=generator) for i in range(4)}


async def write(folder: str, step: int) -> Mapping[str, Checksum]:
    """As the only rank of a policy."""
    return state.save(folder, tensors(step), 0)


def saved(folder: Path, *steps: int) -> CheckpointStore:
    """With a driver's state whose files have some pages too."""
    store = CheckpointStore(folder, keep=9)
    store.next_lineage()
    for step in steps:
        driver = {
            "step": step,
            "text": "x" * 3 * PAGE,
            "bytes": random.Random(step).randbytes(3 * PAGE),
        }
        asyncio.run(store.save(step, driver, lambda folder, step=step: write(folder, step)))  # type: ignore[misc]
    return store


class Restored:
    """What became of a start from ``folder``."""

    def __init__(
        self, folder: Path, resume: str = "auto", refuses: int = 0, patience: float = 0.0
    ) -> None:
        """``refuses``: how often the storage does not give the newest one."""
        self.reported: list[Event] = []
        self.held: dict[str, torch.Tensor] = {}
        self.refuses = refuses
        self.checkpoint = asyncio.run(
            Origin.of(folder, resume).restore(self._take, self.reported.append, patience)
        )

    async def _take(self, found: Checkpoint) -> None:
        if self.refuses and found.step == 2:
            self.refuses -= 1
            raise CheckpointStorageFailed(
                f"{found.trainer}: the trainer's state cannot be read: {EIO}"
            )
        self.held = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
        state.load(found.trainer, self.held, 0, found.sums)
        assert found.state()["step"] == found.step

    @property
    def damaged(self) -> CheckpointDamaged:
        [event] = self.reported
        assert isinstance(event, CheckpointDamaged)
        return event


def flip(file: Path, page: int, generator: random.Random) -> None:
    """What a disk may do: zeros, another file's bytes, or one bit."""
    content = bytearray(file.read_bytes())
    begin, end = page * PAGE, min((page + 1) * PAGE, len(content))
    match generator.choice(["zeros", "noise", "bit"]):
        case "zeros" if any(content[begin:end]):
            content[begin:end] = bytes(end - begin)
        case "noise":
            content[begin:end] = generator.randbytes(end - begin)
        case _:
            content[generator.randrange(begin, end)] ^= 1 << generator.randrange(8)
    file.write_bytes(content)


@pytest.mark.parametrize("flips", [20, pytest.param(200, marks=pytest.mark.slow_faults)])
def test_every_flipped_page_is_found_and_walked_back_from(tmp_path: Path, flips: int) -> None:
    saved(tmp_path / "whole", 1, 2)
    newest = tmp_path / "whole" / "step_000002"
    pages = [
        (file.relative_to(newest), page)
        for file in sorted(newest.rglob("*"))
        if file.is_file()
        for page in range(-(-file.stat().st_size // PAGE))
    ]
    assert {str(file) for file, _ in pages} == {
        "COMPLETE",
        "driver.json",
        "driver.safetensors",
        "trainer/index.json",
        "trainer/rank_0.bin",
        "trainer/random_0.safetensors",
    }
    generator = random.Random(0)
    for number in range(flips):
        folder = tmp_path / "run"
        shutil.copytree(tmp_path / "whole", folder)
        file, page = (
            pages[number] if number < len(pages) and flips > len(pages) else generator.choice(pages)
        )
        flip(folder / "step_000002" / file, page, generator)
        start = Restored(folder)
        assert start.checkpoint is not None
        assert start.checkpoint.step == 1, (number, file, page)
        assert all(torch.equal(start.held[name], tensor) for name, tensor in tensors(1).items())
        assert (start.damaged.checkpoint, start.damaged.file) == (
            "step_000002",
            file.name if file.parent.name else str(file),
        )
        assert [c.step for c in CheckpointStore(folder, keep=2).newest_first()] == [1], (
            "it counts no longer"
        )
        assert (folder / "step_000002.damaged").is_dir()
        assert Restored(folder).reported == []
        shutil.rmtree(folder)


def test_what_the_ranks_wrote_is_what_the_marker_says(tmp_path: Path) -> None:
    """A page that changes between the rank and the marker is found too."""
    store = CheckpointStore(tmp_path, keep=9)

    async def write_and_lose(folder: str) -> Mapping[str, Checksum]:
        sums = await write(folder, 2)
        flip(Path(folder) / "rank_0.bin", 3, random.Random(1))
        return sums

    asyncio.run(store.save(1, {"step": 1}, lambda folder: write(folder, 1)))
    asyncio.run(store.save(2, {"step": 2}, write_and_lose))
    start = Restored(tmp_path)
    assert start.checkpoint is not None
    assert start.checkpoint.step == 1
    assert start.damaged.file == "rank_0.bin"


def test_a_checkpoint_that_other_nodes_wrote_elsewhere_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``output`` is a disk of its own on a rank's node."""
    monkeypatch.setattr(checkpoints, "VISIBLE_WITHIN_S", 0.3)
    own = tmp_path / "of the rank"
    store = CheckpointStore(tmp_path / "run", keep=9)
    with pytest.raises(
        CheckpointError,
        match=r"rank_0\.bin.* written by ranks .* must be a folder that all nodes share",
    ):
        asyncio.run(store.save(1, {"step": 1}, lambda folder: write(str(own), 1)))
    assert store.newest_first() == []
    assert not list((tmp_path / "run").iterdir())


def test_without_a_whole_one_nothing_is_touched(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for step in ("step_000001/trainer/rank_0.bin", "step_000002/driver.json"):
        flip(tmp_path / step, 0, random.Random(2))
    with pytest.raises(
        CheckpointError, match=r"step_000002 cannot be restored: driver\.json.*, nor can 1 more"
    ):
        Restored(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000001", "step_000002"]


def test_a_named_checkpoint_that_is_damaged_is_not_replaced_by_another(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip(tmp_path / "step_000002" / "driver.json", 0, random.Random(2))
    with pytest.raises(CheckpointError, match="step_000002 cannot be restored"):
        Restored(tmp_path, str(tmp_path / "step_000002"))


def test_a_run_whose_only_checkpoint_is_cut_does_not_begin_anew(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / "step_000001" / MARKER).write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="step_000001 cannot be restored: COMPLETE"):
        Restored(tmp_path)


STEPS = ["step_000001", "step_000002"]


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*"))


@pytest.mark.parametrize("unread", ["the trainer's state", "driver.json", MARKER])
def test_storage_that_comes_back_costs_no_step(
    unread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 2)
    monkeypatch.setattr(origin, "STORAGE_RETRY_AFTER_S", 0.0)
    by_rank = unread == "the trainer's state"
    left = [] if by_rank else [EIO] * 3
    opened = Path.open

    def flaky(path: Path, *how: Any, **options: Any) -> Any:
        if left and path == tmp_path / "step_000002" / unread:
            raise left.pop()
        return opened(path, *how, **options)

    monkeypatch.setattr(Path, "open", flaky)
    start = Restored(tmp_path, refuses=3 * by_rank, patience=60.0)
    assert start.checkpoint is not None
    assert (left, start.refuses) == ([], 0)
    assert (start.checkpoint.step, start.reported, folders(tmp_path)) == (2, [], STEPS)


def test_what_the_storage_does_not_give_keeps_its_name(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    start = Restored(tmp_path, refuses=1)
    assert start.checkpoint is not None
    assert (start.checkpoint.step, folders(tmp_path)) == (1, STEPS)
    assert "Input/output error" in start.damaged.why
    later = Restored(tmp_path)
    assert later.checkpoint is not None
    assert (later.checkpoint.step, later.reported) == (2, [])


def test_a_checkpoint_from_before_there_were_sums_loads(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    marker = json.loads((tmp_path / "step_000001" / MARKER).read_text(encoding="utf-8"))
    del marker["crc32"], marker["own_crc32"]
    (tmp_path / "step_000001" / MARKER).write_text(json.dumps(marker), encoding="utf-8")
    found = complete(tmp_path / "step_000001")
    assert found is not None
    assert found.sums == {}
    start = Restored(tmp_path)
    assert (start.checkpoint, start.reported) == (found, [])
    assert all(torch.equal(start.held[name], tensor) for name, tensor in tensors(1).items())
