"""The engine over HTTP against vLLM's own server on CPU: the same tokens and log-probs as ours,
before and after new weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rayloop.core.failures import ConfigError
from rayloop.core.types import FinishReason, Sampling, Version
from rayloop.engines.generation.openai_http import OpenAiHttpEngine
from rayloop.engines.generation.openai_scorer import OpenAiScorer
from rayloop.engines.models import hf_state, load_model
from rayloop.engines.settings import (
    EnginePlace,
    FsdpSettings,
    ModelSettings,
    OpenAiHttpEngineSettings,
)
from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.engines.training.scorer import FrozenScorer
from rayloop.transports.manifest import manifest
from tests.engines.prompts import engine, full_logprobs, prompt, special
from tests.engines.training import trajectory

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="needs the environment with vLLM (make test-vllm)"
    ),
]
UPDATE: dict[str, Any] = {
    "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": "{folder}"}},
    "/reset_prefix_cache": {},
}
START = 400.0
"""Seconds that the server may take to start."""


@pytest.fixture(scope="module")
def url(tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    options = {
        "--model": tiny_text,
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": 512,
        "--logprobs-mode": "processed_logprobs",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(word) for pair in options.items() for word in pair]
    log = tmp_path_factory.mktemp("server") / "log"
    with open(log, "wb") as file:
        server = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=file, stderr=file
        )
    try:
        yield _started(f"http://127.0.0.1:{port}", server, log)
    finally:
        server.terminate()
        server.wait(30)


def _started(url: str, server: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return url
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(log.read_text(encoding="utf-8")[-2000:])


def test_the_logprobs_of_a_served_reference_are_those_of_a_held_one(
    url: str, tiny_text: Path, tmp_path: Path
) -> None:
    model = ModelSettings(path=str(tiny_text))
    turns = [[(5, None, 3)], [(20, None, 11), (6, None, 2)], [(90, None, 300)]]
    played = [trajectory(tiny_text, number, each, Sampling()) for number, each in enumerate(turns)]
    served = OpenAiScorer(model, f"{url}/v1/").logprobs(played)
    held = FrozenScorer(model, FsdpSettings()).logprobs(played)
    assert [len(each) for each in served] == [3, 13, 300]
    assert max(float(abs(a - b).max()) for a, b in zip(served, held, strict=True)) < 1e-3

    with pytest.raises(ConfigError, match=r"^reference\.path: .*/v1/completions.*HTTP 400.*512"):
        OpenAiScorer(model, f"{url}/v1").logprobs([trajectory(tiny_text, 0, [(90, None, 500)])])
    other = write_tiny_vlm(
        tmp_path / "other",
        ["another text"] * 50,
        vision=False,
        hidden=64,
        heads=2,
        layers=1,
        vocabulary=320,
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"^reference\.path: .* has another tokenizer than model\.path .*other: of one text a"
            r" token is"
        ),
    ):
        OpenAiScorer(ModelSettings(path=str(other)), f"{url}/v1")


def test_tokens_logprobs_and_weights_are_ours(url: str, tiny_text: Path, tmp_path: Path) -> None:
    model = ModelSettings(path=str(tiny_text))
    settings = {"base_url": f"{url}/v1", "model": "tiny", "interface": "tokens", "update": UPDATE}
    served = OpenAiHttpEngine(
        model, OpenAiHttpEngineSettings.model_validate(settings), EnginePlace(str(tmp_path))
    )
    weights = {name: tensor.clone() for name, tensor in hf_state(load_model(model)).items()}
    noise = torch.Generator().manual_seed(0)
    changed = {
        n: t + 0.3 * t.std() * torch.randn(t.shape, generator=noise) for n, t in weights.items()
    }
    ends = special(
        tiny_text, "<|im_end|>", "<|endoftext|>"
    )  # those of generation_config.json, as in a run
    asked = [
        dataclasses.replace(prompt(tiny_text, f"What is {i} + 9?"), seed=2**62 + i)
        for i in range(4)
    ]
    greedy = [
        Sampling(0.0, 24, 0, (), ends, (7, 9)),
        Sampling(0.0, 24, stop=("e", "a"), end_tokens=ends),
    ]
    sampled = Sampling(0.7, 48, 4, (), (*ends, *range(20, 40)), (7, 9))

    async def play() -> None:
        direct = await engine(tiny_text)
        for version, tensors in ((Version(0, 1), weights), (Version(0, 2), changed)):
            await served.load(manifest(version, tensors), tensors)
            await direct.load(manifest(version, tensors), tensors)
            for one in asked:
                for sampling in greedy:
                    theirs, ours = (
                        await served.generate(one, sampling),
                        await direct.generate(one, sampling),
                    )
                    assert dataclasses.replace(theirs, logprobs=()) == dataclasses.replace(
                        ours, logprobs=()
                    )
                    assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
        direct.close()
        await served.load(manifest(Version(0, 3), weights), weights)
        finished = set()
        for one in asked:
            completion = await served.generate(one, sampled)
            expected = full_logprobs(tiny_text, one, completion.token_ids, sampled)
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
            assert not {7, 9} & set(completion.token_ids)
            assert not set(sampled.end_tokens) & set(completion.token_ids[:-1])
            finished.add(completion.finish)
            assert (completion.finish is FinishReason.END_TOKEN) == (
                completion.token_ids[-1] in sampled.end_tokens
            )
        assert FinishReason.END_TOKEN in finished

    asyncio.run(play())
