"""Adapters as peft writes them: merged into their base by ``export`` and ``eval --checkpoint``,
refused as ``model.path``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen2VLImageProcessorPil,
)

from rayloop.cli import main
from rayloop.core.failures import ConfigError
from rayloop.core.model_files import resolve
from rayloop.engines.tiny_vlm import write_tiny_vlm
from rayloop.run.export import model_of
from tests.support.models import TEXTS
from tests.support.storage import keeps_folders


def adapters(base: Path, folder: Path, *, vision: bool = False) -> torch.nn.Module:
    """Write random adapters for ``base`` into ``folder`` by peft; returns peft's model."""
    from peft import LoraConfig, get_peft_model

    model = (AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_pretrained(
        base, dtype=torch.float32
    )
    torch.manual_seed(3)
    settings = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
    )
    adapted = get_peft_model(model, settings).eval()
    adapted.save_pretrained(folder)
    assert {file.name for file in folder.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    return adapted


@torch.no_grad()
def logits(model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(**inputs).logits
    return found


def test_the_written_model_has_the_logits_of_pefts_own(tiny_text: Path, tmp_path: Path) -> None:
    adapted = adapters(tiny_text, tmp_path / "adapters")
    assert main(["export", str(tmp_path / "adapters"), str(tmp_path / "merged")]) == 0
    inputs = dict(
        AutoTokenizer.from_pretrained(tmp_path / "merged")("Sort: 3 1 2", return_tensors="pt")
    )
    merged, base = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tmp_path / "merged", tiny_text)
    )
    torch.testing.assert_close(
        logits(merged, **inputs), logits(adapted, **inputs), rtol=1e-4, atol=1e-4
    )
    assert (logits(base, **inputs) - logits(adapted, **inputs)).abs().max() > 0.1, (
        "the adapters say something"
    )


def test_a_model_that_sees_is_merged_in_its_tower_too(tiny_vlm: Path, tmp_path: Path) -> None:
    adapted = adapters(tiny_vlm, tmp_path / "adapters", vision=True)
    merged = AutoModelForImageTextToText.from_pretrained(
        model_of(tmp_path / "adapters", tmp_path / "kept"), dtype=torch.float32
    )
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 84, 3), np.uint8))
    shown = Qwen2VLImageProcessorPil.from_pretrained(tiny_vlm)(images=[pixels], return_tensors="pt")
    count = int(shown["image_grid_thw"].prod()) // merged.config.vision_config.spatial_merge_size**2
    ids = torch.tensor([[5, *[merged.config.image_token_id] * count, 6, 7]])
    inputs = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == merged.config.image_token_id).int(),
        **shown,
    }
    torch.testing.assert_close(
        logits(merged, **inputs), logits(adapted, **inputs), rtol=1e-4, atol=1e-4
    )


def test_an_evaluation_merges_the_same_adapters_once(tiny_text: Path, tmp_path: Path) -> None:
    adapters(tiny_text, tmp_path / "adapters")
    first = model_of(tmp_path / "adapters", tmp_path / "kept")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert model_of(tmp_path / "adapters", tmp_path / "kept") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    settings = json.loads(
        (tmp_path / "adapters" / "adapter_config.json").read_text(encoding="utf-8")
    )
    (tmp_path / "adapters" / "adapter_config.json").write_text(
        json.dumps({**settings, "lora_alpha": 1}), encoding="utf-8"
    )
    assert model_of(tmp_path / "adapters", tmp_path / "kept") != first


def test_a_model_that_was_exported_stays_where_its_temporary_folder_does(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters(tiny_text, tmp_path / "adapters")
    with monkeypatch.context() as patch:
        keeps_folders(patch)
        made = model_of(tmp_path / "adapters", tmp_path / "kept")
    assert AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)


def test_adapters_as_the_model_of_a_run_are_refused_with_the_command_that_merges_them(
    tiny_text: Path, tmp_path: Path
) -> None:
    adapters(tiny_text, tmp_path / "adapters")
    with pytest.raises(
        ConfigError,
        match=r"holds adapters .*python -m rayloop export \S+/adapters OUT.*model\.path=OUT",
    ):
        resolve(str(tmp_path / "adapters"))


def test_adapters_of_another_model_are_refused(tiny_text: Path, tmp_path: Path) -> None:
    adapters(tiny_text, tmp_path / "adapters")
    file = tmp_path / "adapters" / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))

    def refused(base: object, match: str) -> None:
        file.write_text(
            json.dumps({**settings, "base_model_name_or_path": str(base)}), encoding="utf-8"
        )
        with pytest.raises(ConfigError, match=match):
            model_of(tmp_path / "adapters", tmp_path / "kept")

    deeper = write_tiny_vlm(tmp_path / "deeper", TEXTS, vision=False, layers=3)
    refused(
        deeper,
        r"adapters .* do not fit .*deeper.*6 tensors are missing or unknown, first \S*layers\.2\.",
    )
    wider = write_tiny_vlm(tmp_path / "wider", TEXTS, vision=False, layers=2, intermediate=64)
    refused(wider, r"adapters .* do not fit .*wider")
    refused(
        "/nowhere",
        r"adapter_config\.json: base_model_name_or_path.*/nowhere is neither a folder here",
    )
    (tmp_path / "adapters" / "adapter_model.safetensors").unlink()
    refused(tiny_text, r"no adapter_model\.safetensors")
