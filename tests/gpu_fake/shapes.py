"""Sizes of the models that the shipped configurations name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

IMAGE_TOKEN_PATCHES = 2
"""Patches of a side of an image token, in Qwen2.5-VL and Qwen3-VL."""


@dataclass(frozen=True)
class ModelShape:
    """What a published model's config.json says about its sizes."""

    family: str
    """transformers' ``model_type``."""
    architecture: str
    rotary: dict[str, Any]
    """Its ``rope_parameters``."""
    text: dict[str, Any]
    """Its ``text_config``."""
    tower: dict[str, Any]
    """Its ``vision_config``, whose output is as wide as the language model."""

    @property
    def image_token_side(self) -> int:
        """Pixels of a side of an image token."""
        return int(self.tower["patch_size"]) * IMAGE_TOKEN_PATCHES

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch of an image, which is two equal frames."""
        tower = self.tower
        return int(tower["in_channels"] * tower["temporal_patch_size"] * tower["patch_size"] ** 2)


TOWER_25 = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "window_size": 112,
    "patch_size": 14,
    "spatial_merge_size": IMAGE_TOKEN_PATCHES,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "hidden_act": "silu",
    "tokens_per_second": 2,
}
TOWER_3 = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": IMAGE_TOKEN_PATCHES,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
    "hidden_act": "gelu_pytorch_tanh",
}
LARGE_TOWER_3 = TOWER_3 | {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def qwen2_5_vl(**text: Any) -> ModelShape:
    """A Qwen2.5-VL with this language model."""
    text = {"use_sliding_window": False, **text}
    rotary = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
    return ModelShape("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", rotary, text, TOWER_25)


def qwen3_vl(tower: dict[str, Any], **text: Any) -> ModelShape:
    """A Qwen3-VL with this language model."""
    rotary = {
        "rope_type": "default",
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
        "rope_theta": 5e6,
    }
    text = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, **text}
    return ModelShape("qwen3_vl", "Qwen3VLForConditionalGeneration", rotary, text, tower)


SHAPES = {
    "2B": qwen3_vl(
        TOWER_3,
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        intermediate_size=6144,
        tie_word_embeddings=True,
    ),
    "3B": qwen2_5_vl(
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        intermediate_size=11_008,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "4B": qwen3_vl(
        TOWER_3,
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        intermediate_size=9728,
        tie_word_embeddings=True,
    ),
    "7B": qwen2_5_vl(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18_944,
        vocab_size=152_064,
        tie_word_embeddings=False,
    ),
    "8B": qwen3_vl(
        LARGE_TOWER_3,
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        intermediate_size=12_288,
        tie_word_embeddings=False,
    ),
}
"""By the size in a model's name. UI-TARS-1.5 and PyVision are Qwen2.5-VL; GUI-Owl-1.5 and OpenWebRL
are Qwen3-VL.

Source of Qwen3-VL: 2B and 8B from pytorch/torchtitan (BSD-3-Clause),
torchtitan/experiments/qwen3_vl/__init__.py; 4B from the config.json of Qwen/Qwen3-VL-4B-Instruct.
"""
