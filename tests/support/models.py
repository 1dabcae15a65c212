"""Fixtures for tests with real runs: the smallest models that train, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayloop.engines.tiny_vlm import write_tiny_vlm

SIZES = {"hidden": 64, "heads": 2, "layers": 1, "intermediate": 128, "vocabulary": 320}
PICTURE = {
    "hidden": 64,
    "heads": 2,
    "layers": 1,
    "intermediate": 128,
    "vocabulary": 320,
    "vision_hidden": 64,
    "vision_heads": 2,
    "vision_depth": 2,
    "vision_intermediate": 96,
}
TEXTS = [f"Sort: {a} {b} {c}" for a in range(10) for b in range(10) for c in range(10)]
QUESTIONS = [f"What is shown in picture {i}? Look again: {3 * i}." for i in range(200)]


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only model with random weights."""
    torch.set_num_threads(1)
    return write_tiny_vlm(tmp_path_factory.mktemp("digits"), TEXTS, vision=False, **SIZES)


@pytest.fixture(scope="session")
def picture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL with random weights and a tied head."""
    torch.set_num_threads(1)
    return write_tiny_vlm(tmp_path_factory.mktemp("pictures"), QUESTIONS, **PICTURE)


@pytest.fixture(scope="session")
def grounding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL with random weights."""
    torch.set_num_threads(1)
    vision = {"vision_hidden": 32, "vision_depth": 1, "vision_heads": 1, "vision_intermediate": 64}
    return write_tiny_vlm(tmp_path_factory.mktemp("grounding"), TEXTS, **SIZES, **vision)
