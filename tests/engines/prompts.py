"""Building prompts for engine tests: images by content, expanded image tokens, and an engine loaded
with a version.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer

from rayloop.core.types import PromptImage, Sampling, TokenPrompt, Version
from rayloop.data.images import ImageGeometry, image_ref
from rayloop.engines.generation.transformers import TransformersEngine
from rayloop.engines.models import hf_state, load_model, load_vision
from rayloop.engines.settings import EnginePlace, ModelSettings, TransformersEngineSettings
from rayloop.transports.manifest import manifest

PATCH, MERGE = 14, 2


def image(width: int, height: int, seed: int = 0) -> PromptImage:
    """A random PNG. The processor does not resize it when its sides are multiples of 28 pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    model = ModelSettings(path="")
    geometry = ImageGeometry(PATCH, MERGE, model.min_pixels, model.max_pixels)
    return PromptImage(image_ref(file.getvalue(), width, height, geometry), file.getvalue())


def prompt(folder: Path, *parts: str | PromptImage, seed: int = 0) -> TokenPrompt:
    """Text and images in reading order as one expanded prompt."""
    tokenizer = _tokenizer(folder)
    texts = [
        (
            part
            if isinstance(part, str)
            else "<|vision_start|>" + "<|image_pad|>" * part.ref.tokens + "<|vision_end|>"
        )
        for part in parts
    ]
    images = tuple(part for part in parts if not isinstance(part, str))
    return TokenPrompt(tuple(tokenizer("".join(texts)).input_ids), images, seed=seed)


def special(folder: Path, *tokens: str) -> tuple[int, ...]:
    return tuple(_tokenizer(folder).convert_tokens_to_ids(list(tokens)))


@cache
def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def _reference(folder: Path) -> tuple[Any, Any]:
    """The model of the folder, which transformers itself runs, and what prepares its images."""
    written = max(file.stat().st_mtime_ns for file in folder.iterdir())
    return _loaded(folder, written)


@lru_cache(maxsize=4)
def _loaded(folder: Path, written: int) -> tuple[Any, Any]:
    settings = ModelSettings(path=str(folder))
    model = load_model(settings)
    return model, load_vision(settings, model.config)


def vision_tokens(folder: Path) -> tuple[int, ...]:
    return special(
        folder,
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )


async def engine(
    folder: Path, version: Version = Version(0, 0), **settings: object
) -> TransformersEngine:
    """An engine that serves the folder's own weights as ``version``."""
    model = ModelSettings(path=str(folder))
    served = TransformersEngine(
        model, TransformersEngineSettings.model_validate({"threads": 1, **settings}), EnginePlace()
    )
    weights = hf_state(load_model(model))
    await served.load(manifest(version, weights), weights)
    return served


def hf_greedy(
    folder: Path, request: TokenPrompt, n: int, banned: tuple[int, ...] = ()
) -> list[int]:
    """transformers' own generate, one prompt at a time."""
    model, vision = _reference(folder)
    ids = torch.tensor([request.token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if request.images and vision is not None:
        inputs["pixel_values"] = torch.cat([vision.pixels(i.ref, i.data) for i in request.images])
        inputs["image_grid_thw"] = torch.tensor([i.ref.grid for i in request.images])
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    out = model.generate(
        **inputs,
        max_new_tokens=n,
        min_new_tokens=n,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=list(banned) or None,
    )
    return out[0, ids.shape[1] :].tolist()


def full_logprobs(
    folder: Path, prompt: TokenPrompt, sampled: Sequence[int], sampling: Sampling
) -> Tensor:
    """Log-probs [N] of ``sampled`` from one forward of the whole sequence, by the model's own
    position ids.
    """
    return distributions(folder, prompt, sampled, sampling).gather(
        1, torch.tensor(sampled)[:, None]
    )[:, 0]


def distributions(
    folder: Path, prompt: TokenPrompt, sampled: Sequence[int], sampling: Sampling
) -> Tensor:
    """Log-probs [N, V] at the positions of ``sampled``, before ``top_p`` and ``top_k``."""
    model, vision = _reference(folder)
    inputs: dict[str, Tensor] = {"input_ids": torch.tensor([[*prompt.token_ids, *sampled]])}
    if prompt.images and vision is not None:
        inputs["pixel_values"] = torch.cat([vision.pixels(i.ref, i.data) for i in prompt.images])
        inputs["image_grid_thw"] = torch.tensor([i.ref.grid for i in prompt.images])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(**inputs).logits[0, len(prompt.token_ids) - 1 : -1].float()
    logits[:, list(sampling.banned_tokens)] = -torch.inf
    logits[: sampling.min_tokens, list(sampling.end_tokens)] = -torch.inf
    return torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
