"""How many threads compute: what is tried, what is chosen, and that every process which computes finds out when it is asked to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from rayloop.engines import linear, threads
from rayloop.engines.computing import Computing, measured, of, until_measured
from rayloop.engines.cores import quota, usable
from rayloop.engines.generation.build import Place
from rayloop.engines.generation.transformers import TransformersEngine
from rayloop.engines.models import load_model
from rayloop.engines.settings import FsdpSettings, ModelSettings, TransformersEngineSettings, VllmEngineSettings
from rayloop.engines.timing import ROUNDS, medians
from rayloop.engines.training.scorer import FrozenScorer
from rayloop.run.config import RunConfig
from tests.engines.training import engine, run_ranks
from tests.support.runs import settings


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def took(times: dict[int, float]) -> Callable[..., dict[int, float]]:
    def medians(ways: Mapping[int, Callable[[], float]], seconds: float) -> dict[int, float]:
        assert list(ways) == sorted(times)
        return times

    return medians


def cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(threads, "usable", lambda: number)


def test_one_half_or_all_of_a_share_of_the_cores_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 16)
    assert threads.candidates() == [1, 8, 16]
    assert threads.candidates(sharing=4) == [1, 2, 4]
    assert threads.candidates(sharing=32) == [1]
    cores(monkeypatch, 2)
    assert threads.candidates() == [1, 2]


def test_a_control_group_takes_cores_away(tmp_path: Path) -> None:
    assert usable(tmp_path) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="utf-8")
    assert (quota(tmp_path), usable(tmp_path)) == (1.5, 1)
    (tmp_path / "cpu.max").write_text("max 100000\n", encoding="utf-8")
    assert quota(tmp_path) is None


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({1: 1.0, 2: 0.95, 4: 0.94}, 1),
        ({1: 1.0, 2: 0.55, 4: 0.52}, 2),
        ({1: 1.0, 2: 0.55, 4: 0.3}, 4),
        ({1: 1.0, 2: 1.4, 4: 0.7}, 4),
        ({1: 1.0, 2: 3.0, 4: 9.0}, 1),
    ],
)
def test_more_threads_must_pay(times: dict[int, float], chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 4)
    monkeypatch.setattr(threads, "medians", took(times))
    assert threads.use_fastest(lambda: None) == chosen == torch.get_num_threads()


def test_nothing_is_timed_where_one_thread_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    monkeypatch.setattr(threads, "medians", None)
    assert threads.use_fastest(lambda: None, sharing=2) == 1


def test_a_median_is_of_what_the_ways_say_without_the_first_round() -> None:
    said = {1: iter([9.0, 1.0, 5.0, 2.0, *[2.0] * ROUNDS]), 2: iter([9.0, 4.0, 4.0, 8.0, *[4.0] * ROUNDS])}
    assert medians({name: lambda name=name: next(said[name]) for name in said}, seconds=0.0) == {1: 2.0, 2: 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_timed_work_takes_little_and_draws_nothing(tiny_vlm: Path, dtype: torch.dtype) -> None:
    model = load_model(ModelSettings(path=str(tiny_vlm), kernels="torch"), dtype=dtype)
    before = torch.get_rng_state()
    for work in (threads.training(model, dtype), threads.decoding(model, dtype, 64)):
        assert 0 < threads._with(1, work) < 1.0
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_kernels_wait_for_the_threads_that_are_still_to_be_timed() -> None:
    model = ModelSettings(path="x")
    assert until_measured(model, "auto").kernels == "torch"
    assert until_measured(model, 2).kernels == until_measured(model, None).kernels == "auto"
    named = ModelSettings(path="x", kernels="onednn")
    assert until_measured(named, "auto") is named


def test_a_process_that_comes_later_takes_the_measured_number() -> None:
    assert measured(FsdpSettings(), 3).threads == measured(TransformersEngineSettings(), 3).threads == 3
    assert measured(FsdpSettings(threads=1), 3).threads == 1
    assert measured(FsdpSettings(), None).threads == "auto"
    served = VllmEngineSettings()
    assert measured(served, 3) is served


def test_a_repeatable_run_times_nothing(tmp_path: Path) -> None:
    for deterministic, expected in ((False, "auto"), (True, None)):
        values = settings(
            tmp_path, tmp_path, rollout__deterministic=deterministic, rollout__engine={}, policy__engine={}
        )  # fmt: skip
        config = RunConfig.model_validate(values)
        assert getattr(config.engine, "threads") == config.trainer.threads == expected  # noqa: B009


def test_the_trainer_measures_when_asked_and_takes_what_it_finds(tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    monkeypatch.setattr(threads, "medians", took({1: 1.0, 2: 0.5}))
    asked: list[int] = []
    monkeypatch.setattr(linear, "_measured", lambda shape, number: asked.append(number) or linear.Products())
    with engine(tiny_vlm) as made:
        assert (torch.get_num_threads(), asked) == (1, [])
        found = made.measure()
        assert found.threads == torch.get_num_threads() == 2
        assert found.kernels.startswith("2 threads, ")
        assert asked == [2], "kernels are timed with the threads that use them"
        assert made.measure(sharing=2).threads == 1
    with engine(tiny_vlm, FsdpSettings(threads=1)) as made:
        monkeypatch.setattr(threads, "medians", None)
        assert made.measure().kernels.startswith("1 thread, ")


def _ranks(rank: int, world_size: int, model: Path, meeting: Path) -> int:
    threads.usable = lambda: 4  # type: ignore[assignment]
    threads.medians = took({1: 1.0, 2: 0.5 if rank else 1.0})  # type: ignore[assignment]
    with engine(model, rank=rank, world_size=world_size, meeting=meeting) as made:
        return made.measure(sharing=2).threads


def test_ranks_take_the_smallest_number(tiny_vlm: Path, tmp_path: Path) -> None:
    assert run_ranks(_ranks, 2, tiny_vlm, tmp_path / "store") == [1, 1]


def test_the_engine_measures_in_the_thread_that_decodes(tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    monkeypatch.setattr(threads, "medians", took({1: 1.0, 2: 0.5}))
    made = TransformersEngine(ModelSettings(path=str(tiny_vlm)), TransformersEngineSettings(), Place())
    try:
        found = asyncio.run(made.measure())
        assert (found.threads, found.kernels) == (2, of(2, linear.chosen()))
        assert made._worker.submit(torch.get_num_threads).result() == 2
        assert asyncio.run(made.measure(sharing=2)).threads == 1
    finally:
        made.close()


def test_the_reference_measures_as_the_trainer_does(tiny_vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2)
    monkeypatch.setattr(threads, "medians", took({1: 1.0, 2: 0.5}))
    made = FrozenScorer(ModelSettings(path=str(tiny_vlm)), FsdpSettings())
    assert torch.get_num_threads() == 1
    made.measure()
    assert torch.get_num_threads() == 2


def test_what_computes_is_told_in_words() -> None:
    assert Computing(2, of(2, "mkl", "sdpa attention")).kernels == "2 threads, mkl, sdpa attention"
    assert of(1, "", "") == "1 thread"
