"""What the engine makes of vLLM's answers: requests that are given up, prepared during a pause, or
answered during a load.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rayloop.engines.generation.vllm as module
from rayloop.core.failures import InfrastructureFailure, WeightSyncError, WorkerLost
from rayloop.core.token_mask import TokenMask
from rayloop.core.types import (
    Completion,
    FinishReason,
    ImageRef,
    PromptImage,
    Sampling,
    TokenPrompt,
    Version,
)
from rayloop.engines.generation import vllm_worker
from rayloop.engines.generation.vllm import RETRY_PAUSES_S, VllmEngine
from rayloop.engines.generation.vllm_process import common_arguments, prepare
from rayloop.engines.generation.vllm_worker import VllmWorker
from rayloop.engines.settings import EnginePlace, ModelSettings, VllmEngineSettings
from rayloop.run.config import RunConfig
from rayloop.transports.manifest import manifest
from tests.support.runs import settings

OLD, NEW = Version(0, 0), Version(0, 1)
PROMPT = TokenPrompt((5, 6, 7), (), seed=1)


class Llm:
    """AsyncLLM. A request is prepared while ``preparing`` is unset, answered when a test says so."""

    def __init__(self) -> None:
        self.model_config, self.errored = SimpleNamespace(max_model_len=64), False
        self.log: list[str] = []
        self.preparing, self.answering = asyncio.Event(), asyncio.Event()
        self.preparing.set()
        self.answering.set()
        self.reasons: list[str] = []
        self.logprobs: dict[str, Any] = {
            "logprobs": SimpleNamespace(logprobs=[-1.0], token_ids=[8]),
            "sampling_mask": None,
        }
        self.faults: list[bytes | None] = [None]

    async def add_request(self, number: str, prompt: dict[str, Any], parameters: Any) -> None:
        await self.preparing.wait()
        self.log.append("added")

    async def generate(
        self, prompt: dict[str, Any], parameters: Any, number: str, lora_request: Any
    ) -> AsyncIterator[Any]:
        await self.add_request(number, prompt, parameters)
        await self.answering.wait()
        reason = self.reasons.pop(0) if self.reasons else "length"
        output = SimpleNamespace(
            token_ids=[8], finish_reason=reason, stop_reason=None, **self.logprobs
        )
        yield SimpleNamespace(outputs=[output])

    async def pause_generation(self, **options: Any) -> None:
        self.log.append("paused")

    async def resume_generation(self) -> None:
        self.log.append("resumed")

    async def collective_rpc(self, name: str, args: Any = ()) -> list[bytes | None]:
        return self.faults

    async def reset_encoder_cache(self) -> None: ...


def made_with(arguments: Any, usage_context: str = "engine", **options: Any) -> Llm:
    made = Llm()
    made.log.append(usage_context)
    return made


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, known in {
        "vllm": {},
        "vllm.config": {"ProfilerConfig": dict},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": dict},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=made_with)},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(LLM_CLASS="offline")},
        "vllm.v1.engine.exceptions": {
            "EngineDeadError": type("Dead", (Exception,), {}),
            "EngineGenerateError": type("Failed", (Exception,), {}),
        },
    }.items():
        made = types.ModuleType(name)
        made.__dict__.update(known)
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(module, "prepare", lambda *_: None)
    monkeypatch.setattr(module, "stat_loggers", lambda *_: [])
    monkeypatch.setattr(module, "_parameters", lambda *_: None)
    monkeypatch.setattr(module, "RETRY_PAUSES_S", (0.0,) * len(RETRY_PAUSES_S))
    config = SimpleNamespace(
        model_type="qwen2", sub_configs={}, get_text_config=lambda: SimpleNamespace(vocab_size=320)
    )
    monkeypatch.setattr(module.AutoConfig, "from_pretrained", lambda *_, **__: config)


def run(test: Callable[[VllmEngine, Any], Awaitable[None]], **options: Any) -> None:
    async def go() -> None:
        engine = VllmEngine(
            ModelSettings(path="x"), VllmEngineSettings.model_validate(options), EnginePlace()
        )
        assert engine._llm.log == ["offline"], "the device decides how many tokens a step holds"
        await load(engine, OLD)
        engine._llm.log.clear()
        async with asyncio.timeout(30):
            await test(engine, engine._llm)

    asyncio.run(go())


async def load(engine: VllmEngine, version: Version) -> None:
    await engine.pause()
    try:
        await engine.load(manifest(version, {}), {})
    finally:
        await engine.resume()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("given", "limit"), [({}, 4096), ({"extra": {"max_model_len": 8192}}, 8192)]
)
def test_the_engine_has_room_for_an_episode(
    tmp_path: Path, given: dict[str, Any], limit: int
) -> None:
    """By the model's own limit, which may be lower, an episode would be excluded instead of ending
    as over_length.
    """
    changes = {
        "rollout__engine": {"kind": "vllm", **given},
        "environment__episode__max_tokens": 4096,
        "environment__episode__max_prompt_tokens": 2048,
    }
    config = RunConfig.model_validate(settings(tmp_path, tmp_path, **changes))
    assert common_arguments("model", config.engine)["max_model_len"] == limit  # type: ignore[arg-type]


def test_a_request_that_is_given_up_for_ever_fails_without_blaming_the_engine() -> None:
    async def test(engine: VllmEngine, llm: Llm) -> None:
        llm.reasons = ["error"] * 50
        with pytest.raises(InfrastructureFailure, match="gave the request up 4 times") as raised:
            await engine.generate(PROMPT, Sampling())
        assert not isinstance(raised.value, WorkerLost)
        assert len(llm.log) == 4

    run(test)


def test_an_image_that_was_forgotten_is_sent_again() -> None:
    async def test(engine: VllmEngine, llm: Llm) -> None:
        llm.reasons = ["error", "error"]
        done = await engine.generate(PROMPT, Sampling())
        assert done == Completion((8,), (-1.0,), FinishReason.LENGTH, OLD)

    run(test)


def test_the_kept_tokens_are_those_whose_logprobs_are_finite_or_vllm_s_own_mask() -> None:
    async def test(engine: VllmEngine, llm: Llm) -> None:
        likeliest = {"logprobs": [-1.0, -0.5, -1.0, -np.inf], "token_ids": [8, 3, 8, 5]}
        llm.logprobs["logprobs"] = SimpleNamespace(**likeliest)
        done = await engine.generate(PROMPT, Sampling(top_p=0.9))
        assert (done.logprobs, done.token_mask) == ((-1.0,), TokenMask.of([[3, 8]]))
        assert (await engine.generate(PROMPT, Sampling())).token_mask is None
        llm.logprobs["logprobs"] = SimpleNamespace(logprobs=[-1.0], token_ids=[8])
        llm.logprobs["sampling_mask"] = SimpleNamespace(token_ids=[[3, 8]])
        assert await engine.generate(PROMPT, Sampling(top_p=0.9)) == done

    run(test)


def test_more_ties_than_come_back_are_no_kept_set() -> None:
    """All that came back are kept, so others may be."""

    async def test(engine: VllmEngine, llm: Llm) -> None:
        n = 5 + module.TIED_TOKENS
        llm.logprobs["logprobs"] = SimpleNamespace(
            logprobs=[-1.0] * (n + 1), token_ids=[8, *range(n)]
        )
        with pytest.raises(
            InfrastructureFailure, match=r"kept 64 or more tokens above top_k \(5\)"
        ):
            await engine.generate(PROMPT, Sampling(top_k=5))

    run(test)


def test_a_request_in_preparation_is_in_before_the_weights_change() -> None:
    """It would else carry the version of the old weights and run under the new ones."""

    async def test(engine: VllmEngine, llm: Llm) -> None:
        llm.preparing.clear()
        asked = asyncio.create_task(engine.generate(PROMPT, Sampling()))
        await settle()
        loading = asyncio.create_task(load(engine, NEW))
        await settle()
        later = asyncio.create_task(engine.generate(PROMPT, Sampling()))
        await settle()
        llm.preparing.set()
        await loading
        assert (await asked).version == OLD
        assert (await later).version == NEW
        assert llm.log == ["added", "paused", "resumed", "added"]

    run(test)


def test_a_request_that_dies_in_preparation_does_not_hold_the_pause() -> None:
    async def test(engine: VllmEngine, llm: Llm) -> None:
        llm.preparing.clear()
        asked = asyncio.create_task(engine.generate(PROMPT, Sampling()))
        await settle()
        loading = asyncio.create_task(load(engine, NEW))
        await settle()
        asked.cancel()
        await loading
        assert llm.log == ["paused", "resumed"]

    run(test)


def test_a_pause_that_fails_lets_those_go_on_that_wait_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: VllmEngine, llm: Llm) -> None:
        async def broken(**options: Any) -> None:
            asked.append(asyncio.create_task(engine.generate(PROMPT, Sampling())))
            await settle()
            raise Exception("the scheduler is gone")

        asked: list[asyncio.Task[Completion]] = []
        monkeypatch.setattr(llm, "pause_generation", broken)
        with pytest.raises(WorkerLost, match="the scheduler is gone"):
            await engine.pause()
        assert (await asked[0]).version == OLD

    run(test)


def test_an_answer_that_arrives_while_weights_are_loaded_is_the_old_weights_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(engine: VllmEngine, llm: Llm) -> None:
        llm.answering.clear()
        asked = asyncio.create_task(engine.generate(PROMPT, Sampling()))
        await settle()

        async def rpc(name: str, args: Any = ()) -> list[bytes | None]:
            llm.answering.set()
            await settle()
            return [None]

        monkeypatch.setattr(llm, "collective_rpc", rpc)
        await load(engine, NEW)
        assert (await asked).version == OLD

    run(test)


def test_an_answer_after_a_failed_load_is_none() -> None:
    async def test(engine: VllmEngine, llm: Llm) -> None:
        llm.answering.clear()
        asked = asyncio.create_task(engine.generate(PROMPT, Sampling()))
        await settle()
        llm.faults = [pickle.dumps(WeightSyncError("a checksum is wrong"))]
        with pytest.raises(WeightSyncError):
            await load(engine, NEW)
        llm.faults = [None]
        await load(engine, NEW)
        llm.answering.set()
        with pytest.raises(WorkerLost, match="a load failed"):
            await asked

    run(test)


def test_images_are_prepared_beside_the_event_loop_and_not_under_an_old_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An actor that prepares 256 images of 8 megapixels answers health checks, and a weight update
    meanwhile is the newer one.
    """
    preparing, go_on = threading.Event(), threading.Event()

    def prepare_slowly(self: VllmEngine, image: PromptImage) -> str:
        preparing.set()
        assert go_on.wait(20)
        return "pixels"

    monkeypatch.setattr(VllmEngine, "_image", prepare_slowly)
    monkeypatch.setattr(module, "collapsed", lambda prompt, token, **_: list(prompt.token_ids))
    picture = PromptImage(ImageRef("a" * 64, 28, 28, (1, 2, 2), 1))

    async def test(engine: VllmEngine, llm: Llm) -> None:
        asked = asyncio.create_task(
            engine.generate(TokenPrompt((5, 6, 7), (picture,), seed=1), Sampling())
        )
        while not preparing.is_set():
            await asyncio.sleep(0.01)
        engine.health()
        await load(engine, NEW)
        go_on.set()
        assert (await asked).version == NEW
        assert llm.log[-1] == "added"

    run(test)


@pytest.mark.parametrize(
    ("given", "fraction"),
    [
        ({}, 0.9),
        ({"gpu_memory_utilization": 0.5}, 0.5),
        ({"kv_cache_memory_bytes": 1 << 30}, 0.01),
        ({"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.3}, 0.3),
    ],
)
def test_an_engine_whose_cache_is_given_starts_beside_others_on_its_gpu(
    given: dict[str, Any], fraction: float
) -> None:
    """vLLM (v1/worker/utils.py, request_memory) wants gpu_memory_utilization of the whole GPU free,
    whatever it then takes.
    """
    assert (
        common_arguments("model", VllmEngineSettings(extra=given))["gpu_memory_utilization"]
        == fraction
    )


def test_flashinfer_is_not_compiled_unless_somebody_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.32.0", raising=False)
    monkeypatch.setattr(os, "environ", {})
    prepare(VllmEngineSettings(), str(tmp_path))
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setattr(os, "environ", {"VLLM_USE_FLASHINFER_SAMPLER": "1"})
    prepare(VllmEngineSettings(), str(tmp_path))
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


class Weights(torch.nn.Module):
    packed_modules_mapping: dict[str, list[str]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = (
            torch.nn.Parameter(torch.zeros(2)),
            torch.nn.Parameter(torch.zeros(1)),
        )

    def load_weights(self, given: Any) -> set[str]:
        return {name for name, _ in given}


class Quantised(VllmWorker):
    """A worker whose model has scales that are in no checkpoint."""

    def __init__(self, quantization: str | None) -> None:
        model, config = Weights(), SimpleNamespace(quantization=quantization)
        self.model_runner = SimpleNamespace(get_model=lambda: model, model_config=config)

    def reload_weights(self, weights_iterator: Any) -> None:
        self.model_runner.get_model().load_weights(weights_iterator)


def test_scales_of_quantised_weights_are_not_missed_and_weights_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for repacks in ("_refresh_tied_head", "_repack_experts"):
        monkeypatch.setattr(vllm_worker, repacks, lambda model: None)
    whole = {"weight": torch.ones(2)}
    with pytest.raises(WeightSyncError, match="scale is missing"):
        Quantised(None)._load(OLD, iter(whole.items()))
    worker = Quantised("fp8")
    worker._load(OLD, iter(whole.items()))
    with pytest.raises(WeightSyncError, match="weight is missing"):
        worker._load(NEW, iter(()))
