"""The smallest model folders that the unit tests can render with."""

from __future__ import annotations

from pathlib import Path

import pytest

TEXTS = [f"Click the red button {i}. The answer is {3 * i}, thank you." for i in range(50)]
SMALL = {
    "hidden": 64,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 64,
    "vocabulary": 512,
}
SMALL_VISION = {
    "vision_hidden": 64,
    "vision_depth": 1,
    "vision_heads": 2,
    "vision_intermediate": 64,
}


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL folder."""
    from rayloop.engines.tiny_vlm import write_tiny_vlm

    return write_tiny_vlm(tmp_path_factory.mktemp("vision"), TEXTS, **SMALL, **SMALL_VISION)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text-only Qwen2 folder."""
    from rayloop.engines.tiny_vlm import write_tiny_vlm

    return write_tiny_vlm(tmp_path_factory.mktemp("text"), TEXTS, vision=False, **SMALL)
