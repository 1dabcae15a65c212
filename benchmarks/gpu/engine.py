"""vLLM by itself: whether its compiled code loads beside this torch, how long an engine needs to
start, which sampler works.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.children import Child
from benchmarks.gpu.result import Found, Place, Skipped

ENGINE_TIMEOUT_S = 500.0
"""Seconds for one engine."""


def extensions(place: Place) -> Found:
    """Each shared library of vLLM, loaded into a process of its own that has torch."""
    for file in sorted(_folder().glob("*.so")):
        yield file.name, Child(load, str(file)).answer(ENGINE_TIMEOUT_S)
    yield "import vllm", Child(versions).answer(ENGINE_TIMEOUT_S)


def start(place: Place) -> Found:
    """Seconds from nothing to a healthy engine, to loaded weights, and tokens per second; the
    second time caches are warm.

    ``recovery.start_timeout`` is to be longer. Eager: without compilation and CUDA graphs.
    """
    _folder()
    folder = str(models.vlm(place))
    yield (
        "eager",
        Child(engine, folder, place.tiny, {"enforce_eager": True}, {}).answer(ENGINE_TIMEOUT_S),
    )
    if not place.tiny:
        yield "compiled, first", Child(engine, folder, False, {}, {}).answer(ENGINE_TIMEOUT_S)
        yield "compiled, again", Child(engine, folder, False, {}, {}).answer(ENGINE_TIMEOUT_S)


def sampler(place: Place) -> Found:
    """A judge samples with top-k and top-p, for which vLLM may take FlashInfer's sampler, which is
    compiled at its first use.
    """
    _folder()
    folder = str(models.text(place))
    for name, flashinfer in (("PyTorch's", "0"), ("FlashInfer's", "1")):
        yield name, Child(sampled, folder, place.tiny, flashinfer).answer(ENGINE_TIMEOUT_S)


def _folder() -> Path:
    """vLLM's, without importing it. Raises Skipped."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Skipped("vLLM is not installed")
    return Path(spec.origin).parent


def load(file: str) -> bool:
    """Load a shared library. Raises OSError with what it lacks."""
    import torch

    torch.ops.load_library(file)
    return True


def versions() -> dict[str, str]:
    """Of vLLM, and what it takes this machine for."""
    import vllm
    from vllm.platforms import current_platform

    return {"vllm": vllm.__version__, "platform": str(current_platform.device_type)}


def engine(
    folder: str, tiny: bool, extra: dict[str, Any], variables: dict[str, str]
) -> dict[str, Any]:
    """Start rayloop's engine, load weights as a weight update does, and generate."""
    os.environ |= variables
    from rayloop.core.types import Sampling, TokenPrompt, Version
    from rayloop.engines.generation.vllm import VllmEngine
    from rayloop.engines.models import hf_state, load_model
    from rayloop.engines.settings import EnginePlace as Where
    from rayloop.engines.settings import ModelSettings, VllmEngineSettings
    from rayloop.transports.manifest import DTYPES, manifest

    dtype, size = ("float32", 64 << 20) if tiny else ("bfloat16", 8 << 30)
    settings = VllmEngineSettings.model_validate(
        {
            "dtype": dtype,
            "max_sequences": 8 if tiny else 128,
            "extra": {
                "kv_cache_memory_bytes": size,
                "max_model_len": 512 if tiny else 4096,
                **extra,
            },
        }
    )
    count, tokens = (2, 4) if tiny else (128, 256)

    async def use() -> dict[str, Any]:
        began = time.perf_counter()
        served = VllmEngine(ModelSettings(path=folder), settings, Where(scratch=tempfile.mkdtemp))
        started = time.perf_counter()
        weights = hf_state(load_model(ModelSettings(path=folder), dtype=DTYPES[dtype]))
        described, ready = manifest(Version(0, 0), weights), time.perf_counter()
        await served.pause()
        await served.load(described, weights)
        await served.resume()
        loaded = time.perf_counter()
        asked = [TokenPrompt(tuple(range(100, 132)), seed=number) for number in range(count)]
        wanted = Sampling(max_tokens=tokens)
        answers = await asyncio.gather(*(served.generate(prompt, wanted) for prompt in asked))
        ended = time.perf_counter()
        served.close()
        made = sum(len(answer.token_ids) for answer in answers)
        return {
            "start_s": round(started - began, 2),
            "load_s": round(loaded - ready, 2),
            "tokens_per_s": round(made / (ended - loaded), 1),
        }

    return asyncio.run(use())


def sampled(folder: str, tiny: bool, flashinfer: str) -> dict[str, Any]:
    """vLLM's own offline engine with top-k and top-p: seconds to its first answer, and of another
    one.
    """
    os.environ |= {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_FLASHINFER_SAMPLER": flashinfer,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        folder,
        enforce_eager=True,
        max_model_len=512,
        kv_cache_memory_bytes=(64 << 20) if tiny else (4 << 30),
        gpu_memory_utilization=0.4,
        generation_config="vllm",
    )
    wanted = SamplingParams(top_k=20, top_p=0.9, max_tokens=4 if tiny else 128, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(100, 120))}] * 4
    seconds = []
    for _ in range(2):
        llm.generate(prompts, wanted, use_tqdm=False)
        seconds.append(round(time.perf_counter() - began, 2))
    return {"first_answer_s": seconds[0], "next_s": round(seconds[1] - seconds[0], 3)}
