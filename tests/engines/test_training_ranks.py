"""Two ranks: the same result as one, empty shares, failures on one rank only, checkpoints read by
another number.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rayloop.core.failures import ConfigError, DataFailure
from rayloop.engines.settings import FsdpSettings, LoraSettings, OptimizerSettings
from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.engines.training import sharding
from tests.engines.invariance import differences, table
from tests.engines.training import VERSION, engine, mixed_items, run_ranks
from tests.support.models import SIZES, TEXTS

TOLERANCE = 1e-4
LORA = FsdpSettings(lora=LoraSettings(rank=4))
ADAMW = OptimizerSettings(lr=1e-3)


@pytest.mark.slow
def test_the_result_does_not_depend_on_how_the_work_is_spread() -> None:
    found = differences()
    print(table(found))
    assert len(found) == 12
    assert [d for d in found if d.largest > TOLERANCE] == []
    assert any(d.largest > 0 for d in found), (
        "identical to the last bit: the layouts did not differ"
    )


def _uneven(rank: int, world_size: int, folder: Path, state: str, meeting: Path) -> dict[str, Any]:
    """Everything on rank 0; rank 1 has nothing, then a different number of mini-batches, then the
    only bad gradient.
    """
    items = mixed_items(folder)
    share = items if rank == 0 else []
    with engine(folder, LORA, ADAMW, rank=rank, world_size=world_size, meeting=meeting) as trainer:
        found: dict[str, Any] = {"start": trainer.logprobs([item.trajectory for item in share])}
        found["first"] = trainer.train([share])
        bad = [dataclasses.replace(items[0], advantage=math.nan)] if rank == 1 else []
        found["skipped"] = trainer.train([bad])["actor/skipped_updates"]
        try:
            trainer.train([share] * (1 + rank))
        except ValueError as error:
            found["error"] = str(error)
        lost = dataclasses.replace(items[1].trajectory, image_bytes={})
        try:
            trainer.logprobs([lost] if rank == 1 else [])
        except DataFailure as error:
            found["lost"] = str(error)
        trainer.perturb("vision")
        trainer.restore_parameters()
        written = trainer.begin_save(state)  # the next step meets what it talks about
        found["second"] = trainer.train([share])
        found["weights"] = trainer.export(VERSION)
        found["written"] = sorted(written.result(60))
    return found


@pytest.mark.slow
def test_a_rank_may_be_empty_and_another_number_of_ranks_continues(
    tiny_vlm: Path, tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    first, second = run_ranks(_uneven, 2, tiny_vlm, state, tmp_path / "meeting")
    items = mixed_items(tiny_vlm)
    assert second["start"] == []
    assert second["weights"] == {}
    assert [r["skipped"] for r in (first, second)] == [1, 1]
    assert [len(r["written"]) for r in (first, second)] == [3, 2], "rank 0 writes the index too"
    assert (
        first["error"]
        == second["error"]
        == "the ranks got from 1 to 2 mini-batches; each needs as many"
    )
    assert first["lost"] == second["lost"]
    assert "neither bytes nor a path" in first["lost"]
    assert _timeless(first["first"]) == _timeless(second["first"])
    with engine(tiny_vlm, LORA, ADAMW) as trainer:
        alone = trainer.train([items])
    assert _timeless(first["first"]) == pytest.approx(_timeless(alone), rel=1e-4)
    with engine(tiny_vlm, LORA, ADAMW, seed=3) as trainer:
        trainer.load(state)
        again = trainer.train([items])
        weights = trainer.export(VERSION)
    assert _timeless(first["second"]) == pytest.approx(_timeless(again), rel=1e-4)
    for name, weight in first["weights"].items():
        assert torch.allclose(weight, weights[name], rtol=1e-4, atol=1e-6), name


def _timeless(report: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in report.items() if "second" not in name}


def _loaded(
    rank: int, world_size: int, folder: Path, meeting: Path
) -> tuple[int, dict[str, torch.Tensor]]:
    """The most bytes of the model's parameters that this rank had in its memory whenever a part was
    sharded; its export.
    """
    most, fully_shard = 0, sharding.fully_shard
    units: list[torch.nn.Module] = []

    def weighing(unit: torch.nn.Module, **options: Any) -> Any:
        nonlocal most
        units.append(unit)
        held = {
            id(p): sharding.local(p).nbytes for u in units for p in u.parameters() if not p.is_meta
        }
        most = max(most, sum(held.values()))
        return fully_shard(unit, **options)

    sharding.fully_shard = weighing
    with engine(folder, rank=rank, world_size=world_size, meeting=meeting) as trainer:
        return most, trainer.export(VERSION)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["tied", "its own", "its own, though the configuration ties it"])
def test_the_whole_model_is_in_the_memory_of_one_rank(tmp_path: Path, head: str) -> None:
    small = SIZES | {"layers": 6}
    folder = write_tiny_vlm(tmp_path / "model", TEXTS, vision=False, tied=head == "tied", **small)
    if "ties" in head:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(
            json.dumps({**config, "tie_word_embeddings": True}), encoding="utf-8"
        )
    (_, exported), (held, nothing) = run_ranks(_loaded, 2, folder, tmp_path / "meeting")
    saved = load_file(folder / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert [name for name, weight in saved.items() if not torch.equal(exported[name], weight)] == []
    assert nothing == {}
    assert held < 0.75 * sum(weight.nbytes for weight in saved.values()), (
        "half of all, and one part"
    )


def _broken(rank: int, world_size: int, folder: Path, empty: Path, meeting: Path) -> str:
    with (
        pytest.raises(ConfigError) as raised,
        engine(empty if rank == 0 else folder, rank=rank, world_size=world_size, meeting=meeting),
    ):
        pass
    assert not torch.distributed.is_initialized()
    return str(raised.value)


class NeedsTwo(Exception):
    """Can be pickled, but not read again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def _unforeseen(rank: int, world_size: int, meeting: Path) -> list[tuple[str, str]]:
    """How each failure of the second rank ends the same call of this one."""

    def fail(error: Exception) -> None:
        if rank == 1:
            raise error

    sharding.join("cpu", rank, world_size, meeting.as_uri(), 60.0)
    unpicklable = TypeError("a lock", threading.Lock())
    found = []
    for error in (
        KeyError("a bug"),
        MemoryError("full"),
        torch.OutOfMemoryError("CUDA"),
        NeedsTwo("a", "b"),
        unpicklable,
    ):
        try:
            sharding.on_all_ranks(partial(fail, error), within=20.0)
        except Exception as raised:
            found.append((type(raised).__name__, str(raised)))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
def test_what_one_rank_raises_all_ranks_raise(tmp_path: Path) -> None:
    """Whatever it is: the others would wait for that rank until the deadline of their collective."""
    first, second = run_ranks(_unforeseen, 2, tmp_path / "meeting")
    assert first == second
    assert [kind for kind, _ in first] == [
        "KeyError",
        "MemoryError",
        "OutOfMemoryError",
        "Unforeseen",
        "Unforeseen",
    ]
    assert first[3][1] == "NeedsTwo: a b"
    assert first[4][1].startswith("TypeError: ('a lock'")


@pytest.mark.slow
def test_weights_that_the_first_rank_cannot_load_end_all_ranks(
    tiny_text: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    first, second = run_ranks(_broken, 2, tiny_text, tmp_path / "empty", tmp_path / "meeting")
    assert first == second
    assert "empty cannot be loaded" in first
