"""Tiny models for the engine tests, made once per session; torch uses one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayloop.engines.tiny_vlm import write_tiny_vlm

TEXTS = [
    f"What is {i} + {3 * i}? The answer is {4 * i}. Click the red button below the dialog."
    for i in range(200)
]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL folder, tied embeddings."""
    return write_tiny_vlm(tmp_path_factory.mktemp("vlm"), TEXTS, layers=2, vision_depth=2)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only Qwen2 folder, untied embeddings."""
    return write_tiny_vlm(
        tmp_path_factory.mktemp("text"), TEXTS, vision=False, tied=False, layers=2
    )
