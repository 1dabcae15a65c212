"""The folders of a refreshed reference: in the run, in its checkpoints, and back again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rayloop.cluster.loop.refreshing import RefreshedReference
from rayloop.core.failures import Damaged
from rayloop.core.types import Version
from rayloop.run.checkpoint import Checkpoint, CheckpointStore


class Ranks:
    """Write a model as the ranks do; there is no Ray here."""

    async def all(self, method: Any, folder: str, version: Version) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_text(f"weights {version}", encoding="utf-8")


class Run:
    def __init__(self, folder: Path, every: int | None = 2) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.reference = folder, RefreshedReference(every, folder)
        self.store = CheckpointStore(folder / "checkpoints", keep=9)
        self.store.folder.mkdir(parents=True, exist_ok=True)

    def refresh(self, *steps: int, lineage: int = 1) -> list[str]:
        for step in steps:
            asyncio.run(self.reference.refresh(Ranks(), Version(lineage, step)))  # type: ignore[arg-type]
        return sorted(path.name for path in (self.folder / "reference").glob("*"))

    def save(self, step: int) -> Checkpoint:
        async def trainer(folder: str) -> Mapping[str, Any]:
            self.reference.keep(Path(folder).parent)
            return {}

        return asyncio.run(self.store.save(step, {"step": step}, trainer))

    @property
    def weights(self) -> str | None:
        """Those in use."""
        used = self.reference.folder
        return None if used is None else (used / "model.safetensors").read_text(encoding="utf-8")


def test_the_newest_two_stay_and_others_are_made_at_their_steps_only(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert run.refresh(1) == []
    assert run.refresh(2, 3, 4, 5, 6) == ["4-1", "6-1"]
    assert run.weights == "weights 1.6"
    never = Run(tmp_path / "never", every=None)
    assert never.refresh(1, 2) == []
    never.reference.keep(tmp_path)
    assert never.weights is None


def test_a_checkpoint_brings_back_what_was_in_use_when_the_run_has_gone_on_or_is_another(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    before = run.save(1)
    run.refresh(2)
    saved = run.save(3)
    held = saved.folder / "reference/2-1/model.safetensors"
    assert held.samefile(run.folder / "reference/2-1/model.safetensors"), "a link needs no room"
    run.refresh(4, 6, 8)
    run.reference.restore(saved)
    assert run.weights == "weights 1.2"
    assert run.refresh(4, lineage=2) == ["2-1", "4-2"]
    run.reference.restore(before)
    assert run.weights is None

    other = Run(tmp_path / "other")
    other.refresh(2)
    (other.folder / "reference/2-1/model.safetensors").write_text("its own", encoding="utf-8")
    other.reference.restore(saved)
    assert other.weights == "weights 1.2"
    other.reference.restore(None)
    assert other.weights is None


def test_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.refresh(2)
    saved = run.save(2)
    (saved.folder / "reference/2-1/model.safetensors").write_text("weights 1.9", encoding="utf-8")
    again = Run(tmp_path / "run")
    found = again.store.find("auto")
    assert found is not None
    with pytest.raises(Damaged, match="reference/2-1/model"):
        again.reference.restore(found)
