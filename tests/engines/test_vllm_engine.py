"""What only vLLM's engine has: limits, processes that die, an installation that may not fit."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path

import psutil
import pytest

from rayloop.core.failures import ConfigError, OverLongPrompt, WorkerLost
from rayloop.core.types import Sampling, TokenPrompt
from rayloop.engines.generation.vllm import _parameters
from rayloop.engines.generation.vllm_process import common_arguments
from rayloop.engines.settings import EnginePlace, ModelSettings, VllmEngineSettings
from tests.contracts.test_engine import ENGINES, GREEDY, Served
from tests.engines.prompts import prompt
from tests.support.vllm_processes import engine_cores, engine_workers


async def until_unhealthy(served: Served) -> None:
    while served.engine.health():
        await asyncio.sleep(0.1)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_dead_worker_fails_what_waits_for_it(tiny_text: Path) -> None:
    """The death of the engine process is in tests/cluster/test_vllm_runs.py."""
    served = Served("vllm", tiny_text, extra=ENGINES["vllm"]["extra"] | {"max_model_len": 512})
    served.run(served.load(served.start))
    this = psutil.Process()
    (core,), (worker,) = engine_cores(this), engine_workers(this)

    async def test() -> None:
        with pytest.raises(OverLongPrompt):
            await served.engine.generate(TokenPrompt(tuple(range(20, 276)) * 2), GREEDY)
        waiting = asyncio.create_task(
            served.engine.generate(prompt(tiny_text, "What"), Sampling(max_tokens=400))
        )
        loading = asyncio.create_task(served.load(served.start))
        worker.kill()
        for call in (waiting, loading):
            with pytest.raises(WorkerLost):
                await call
        with pytest.raises(WorkerLost):
            await until_unhealthy(served)

    served.run(test())
    served.close()
    _, left = psutil.wait_procs([core, worker], 10)
    assert not left


@pytest.mark.parametrize("found", ["0.11.0", None])
def test_an_installation_that_does_not_fit_is_one_line(
    found: str | None, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayloop.engines.generation.vllm import VllmEngine

    module = types.ModuleType("vllm")
    module.__version__ = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module if found else None)
    for name in (
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_RPC_BASE_PATH",
        "TMPDIR",
        "RAYLOOP_ENGINE_OWNER",
    ):
        monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match=found or "needs vLLM") as raised:
        VllmEngine(
            ModelSettings(path=str(tiny_text)),
            VllmEngineSettings(),
            EnginePlace(scratch=lambda: str(tmp_path)),
        )
    assert "\n" not in str(raised.value)


@pytest.mark.vllm
def test_with_its_own_mask_vllm_wants_a_temperature_and_a_top_k_of_every_request() -> None:
    asked = [
        _parameters(TokenPrompt((1,)), s, 320, True)
        for s in (GREEDY, Sampling(0.7), Sampling(top_p=0.8))
    ]
    assert [(one.temperature, one.top_p, one.top_k, one.logprobs) for one in asked] == [
        (1.0, 1.0, 1, 0),
        (0.7, 1.0, 320, 0),
        (1.0, 0.8, 128, 0),
    ]


@pytest.mark.parametrize("key", ["dtype", "logprobs_mode", "override_generation_config"])
def test_arguments_that_are_ours_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"extra: {key}"):
        VllmEngineSettings(extra={key: "x"})


@pytest.mark.parametrize(
    ("extra", "backend"),
    [({}, "uni"), ({"tensor_parallel_size": 2}, "mp"), ({"pipeline_parallel_size": 2}, "mp")],
)
def test_workers_are_never_started_through_ray(extra: dict[str, object], backend: str) -> None:
    arguments = common_arguments("model", VllmEngineSettings(extra=extra))
    assert arguments["distributed_executor_backend"] == backend
