"""Models of real shapes with random weights, and random batches for them: nothing has to be
downloaded.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.result import Place
from benchmarks.peers.text_model import texts
from benchmarks.train import train_item
from rayloop.core.protocols import TrainItem
from rayloop.core.types import ImageRef, Sampling
from rayloop.data.images import ImageGeometry, image_ref
from rayloop.engines.settings import ModelSettings

VLM_3B: dict[str, Any] = {
    "hidden": 2048,
    "layers": 36,
    "heads": 16,
    "kv_heads": 2,
    "intermediate": 11_008,
    "tied": True,
    "vision_hidden": 1280,
    "vision_depth": 32,
    "vision_heads": 16,
    "vision_intermediate": 3420,
    "vision_window": 112,
    "max_positions": 32_768,
    "init": 0.02,
    "rope_theta": 1e6,
}
"""Qwen2.5-VL-3B's, but for ``EXTRA_TOKENS`` tokens, and full attention in every second layer of the
tower.
"""
TEXT_7B: dict[str, Any] = {
    "hidden": 3584,
    "layers": 12,
    "heads": 28,
    "kv_heads": 4,
    "intermediate": 18_944,
    "tied": False,
    "max_positions": 32_768,
    "init": 0.02,
    "rope_theta": 1e6,
}
"""Qwen2.5-7B's, but for 12 of its 28 layers and ``EXTRA_TOKENS`` tokens."""
TINY: dict[str, Any] = {
    "hidden": 64,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 128,
    "vision_hidden": 64,
    "vision_depth": 2,
    "vision_heads": 2,
    "vision_intermediate": 96,
}
EXTRA_TOKENS = 151_000
"""Tokens beside a trained thousand, so that the head is as large as Qwen2.5's."""
TOKEN_SIDE_PIXELS = 28
"""Pixels of one image token's side."""


def vlm(place: Place) -> Path:
    """The folder of a Qwen2.5-VL: of 3B's shape, or a tiny one."""
    return _made(place, "vlm", VLM_3B, vision=True)


def text(place: Place) -> Path:
    """The folder of a text model: of 7B's shape with fewer layers, or a tiny one."""
    return _made(place, "text", TEXT_7B, vision=False)


def _made(place: Place, name: str, sizes: Mapping[str, Any], vision: bool) -> Path:
    folder = place.models / name
    if not (folder / "tokenizer.json").exists():  # it is written last
        from rayloop.engines.tiny_vlm import write_tiny_vlm

        words = () if place.tiny else [f"<w{number}>" for number in range(EXTRA_TOKENS)]
        write_tiny_vlm(
            folder, texts(800), vision=vision, extra_tokens=words, **(TINY if place.tiny else sizes)
        )
    return folder


def batch(
    folder: Path, groups: int, size: int, prompt: int, answer: int, side: int
) -> list[TrainItem]:
    """``groups`` prompts of two images of ``side`` tokens each way and ``prompt`` tokens of text,
    with ``size`` answers to each.
    """
    import numpy as np

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made: list[TrainItem] = []
    for number in range(groups):
        rng = np.random.default_rng(number)
        pictures = [_picture(rng, side) for _ in range(2)]
        ids = rng.integers(64, config["text_config"]["vocab_size"], prompt).tolist()
        for ref, _ in pictures:
            ids += [
                config["vision_start_token_id"],
                *[config["image_token_id"]] * ref.tokens,
                config["vision_end_token_id"],
            ]
        refs, pages = (
            tuple(ref for ref, _ in pictures),
            {ref.sha256: data for ref, data in pictures},
        )
        made += [
            train_item((number, member), tuple(ids), answer, Sampling(), refs, pages)
            for member in range(size)
        ]
    return made


def _picture(rng: Any, side: int) -> tuple[ImageRef, bytes]:
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(
        rng.integers(0, 256, (side * TOKEN_SIDE_PIXELS, side * TOKEN_SIDE_PIXELS, 3), np.uint8)
    ).save(file, "PNG")
    model = ModelSettings(path="")
    geometry = ImageGeometry(TOKEN_SIDE_PIXELS // 2, 2, model.min_pixels, model.max_pixels)
    return image_ref(
        file.getvalue(), side * TOKEN_SIDE_PIXELS, side * TOKEN_SIDE_PIXELS, geometry
    ), file.getvalue()
