"""An exported folder in vLLM alone, which knows the folder, a conversation and a picture.

vLLM renders the folder's chat template, sizes the picture by its processor and ends at the tokens
of its generation config; the trainer computes the log-probs of what vLLM sampled.
"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rayloop.chat.rendering import Renderer
from rayloop.core.types import (
    EndReason,
    ImageSource,
    Message,
    Sampling,
    Trajectory,
    TrajectoryId,
    Turn,
    Version,
)
from rayloop.engines.models.saving import save_model
from rayloop.engines.settings import FsdpSettings, ModelSettings
from tests.contracts.test_model_family import episodes, gaps, sampled, step
from tests.engines.prompts import engine
from tests.engines.training import engine as trainer
from tests.support.model_families import write

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1400)]

KIND = "glm4v"
LIMIT = 1e-4
"""Nats between vLLM's log-prob of a sampled token and the trainer's."""
RESAMPLED_LIMIT = 0.05
"""The same where the picture changes its size: vLLM resamples by torchvision and the run by Pillow,
whose pixels differ; another picture changes the log-probs by 0.4 and more.
"""
SIZES = ((56, 84), (300, 200), (90, 640))
"""Width and height of the pictures, in pixels: the processor changes the last two."""
QUESTION = "What is 3 + 9? Click the red button."
TOKENS = 8


def test_vllm_answers_from_an_exported_folder_as_the_trainer_computes(tmp_path: Path) -> None:
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    start = tmp_path / "start"
    start.mkdir()
    write(KIND, start)
    exported = tmp_path / "exported"
    run = ModelSettings(path=str(start), min_pixels=784, max_pixels=20_000)

    async def first_episodes() -> list[Trajectory]:
        return await episodes(await engine(start, dtype="float32"), start, Version(0, 0))

    with trainer(run, FsdpSettings(dtype="float32")) as trained:
        step(trained, asyncio.run(first_episodes()))
        save_model(start, exported, trained.export(Version(0, 1)), limits=run)
        llm = LLM(
            str(exported),
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=1024,
            logprobs_mode="processed_logprobs",
            limit_mm_per_prompt={"image": 1, "video": 0},
        )
        renderer = Renderer(run)
        played = []
        for number, size in enumerate(SIZES):
            picture = Image.effect_noise(size, 90).convert("RGB")
            wanted = SamplingParams(max_tokens=TOKENS, temperature=1.0, logprobs=0, seed=number)
            [answer] = llm.chat([{"role": "user", "content": content(picture)}], wanted)
            played.append(trajectory(renderer, number, picture, answer))
        whole, *resampled = trained.logprobs(played)
        assert gaps([whole], sampled(played[:1])).max() < LIMIT
        assert gaps(resampled, sampled(played[1:])).max() < RESAMPLED_LIMIT

    for end in renderer.sampling(Sampling()).end_tokens:
        only = SamplingParams(max_tokens=TOKENS, allowed_token_ids=[end])
        [answer] = llm.chat([{"role": "user", "content": QUESTION}], only)
        assert answer.outputs[0].finish_reason == "stop"
        assert list(answer.outputs[0].token_ids) == [end]


def content(picture: Image.Image) -> list[dict[str, Any]]:
    """The parts of a message, as vLLM takes them."""
    return [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": QUESTION}]


def trajectory(renderer: Renderer, number: int, picture: Image.Image, answer: Any) -> Trajectory:
    """vLLM's answer behind our rendering of the same conversation, whose tokens are vLLM's."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    prompt = renderer.prompt([Message("user", (ImageSource(data=file.getvalue()), QUESTION))])
    assert list(prompt.token_ids) == list(answer.prompt_token_ids), f"picture {picture.size}"
    output = answer.outputs[0]
    chosen = zip(output.logprobs, output.token_ids, strict=True)
    logprobs = tuple(at[token].logprob for at, token in chosen)
    turns = (
        Turn("user", prompt.token_ids, tuple(image.ref for image in prompt.images)),
        Turn("assistant", tuple(output.token_ids), (), logprobs, Version(0, 1)),
    )
    return Trajectory(
        TrajectoryId(number, 0),
        0,
        f"task-{number}",
        number,
        turns,
        Sampling(),
        EndReason.DONE,
        image_bytes={image.ref.sha256: image.data for image in prompt.images if image.data},
    )
