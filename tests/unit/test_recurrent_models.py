"""Models that would mix the trajectories of a packed row are refused by their configuration, before
anything starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayloop.core.failures import ConfigError
from rayloop.core.model_families import unsupported
from rayloop.engines.shape import ModelSource
from rayloop.run.preflight import known

REFUSED: dict[str, dict[str, Any]] = {
    "mamba2": {"state_size": 128},
    "falcon_h1": {"mamba_d_ssm": 1536, "num_hidden_layers": 36},
    "bamba": {"mamba_n_heads": 128, "attn_layer_indices": [9]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"lru_width": 2560, "block_types": ["recurrent", "attention"]},
    "cohere_chunks": {"layer_types": ["chunked_attention", "full_attention"]},
}


def configured(folder: Path, kind: str, text: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **text}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_carry_a_state_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"model.path: .*{kind} has layers of .* Use a model whose layers"
    ):
        known(ModelSource(str(configured(tmp_path, kind, REFUSED[kind]))))


@pytest.mark.parametrize(
    "text",
    [
        {"layer_types": ["sliding_attention", "full_attention"]},
        {
            "layer_types": ["attention"] * 2,
            "mamba_d_state": 256,
        },  # a hybrid's configuration without a recurrent layer
        {"head_dim": 64},
    ],
)
def test_attention_is_not(text: dict[str, Any]) -> None:
    assert unsupported("granite", False, text) == ""
