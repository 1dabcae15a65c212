"""Fixtures for tests with real runs: the smallest models that train, made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayloop.engines.tiny_vlm import write_tiny_vlm

SIZES = {"hidden": 64, "heads": 2, "layers": 1, "intermediate": 128, "vocabulary": 320}
TEXTS = [f"Sort: {a} {b} {c}" for a in range(10) for b in range(10) for c in range(10)]


@pytest.fixture(scope="session")
def digits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only model with random weights."""
    torch.set_num_threads(1)
    return write_tiny_vlm(tmp_path_factory.mktemp("digits"), TEXTS, vision=False, **SIZES)
