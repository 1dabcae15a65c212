"""Tiny models of random weights of every family of models, in the layout of a real checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from rayloop.engines.tiny_vlm import write_tiny_vlm

TEXTS = [f"What is {i} + {3 * i}? The answer is {4 * i}. Click the red button." for i in range(100)]
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.1, "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.1,
}  # fmt: skip
DEEP = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
MROPE = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [2, 3, 3]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 24}
ALL_ROTARY = {**MROPE, "partial_rotary_factor": 1.0}
NO_DEPTH = {"num_position_embeddings": 64}
OF_TEXT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "gemma3_text": {"sliding_window": 8, "final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 5.0},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": {**LINEAR, "rope_parameters": ALL_ROTARY},
    "qwen3_5_moe_text": {**LINEAR, **SHARED, "rope_parameters": ALL_ROTARY},
}
OF_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({"rope_parameters": MROPE}, {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": ({"rope_parameters": MROPE}, {"window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ({"rope_parameters": MROPE}, DEEP),
    "qwen3_vl_moe": ({"rope_parameters": MROPE, **EXPERTS}, DEEP),
    "qwen3_5": ({"rope_parameters": ALL_ROTARY, **LINEAR}, NO_DEPTH),
    "qwen3_5_moe": ({"rope_parameters": ALL_ROTARY, **LINEAR, **SHARED, "initializer_range": 0.05}, NO_DEPTH),
}
"""What a family adds to the language model and to the vision tower."""
KINDS = (*OF_TEXT, *OF_IMAGES)


def write(kind: str, folder: Path) -> Path:
    """A folder of this model_type; its vision model has images of 14-pixel patches."""
    images = kind in OF_IMAGES
    write_tiny_vlm(folder, TEXTS, vision=images, hidden=32, heads=1, layers=1, intermediate=32, vision_depth=1, vision_hidden=32,
                   vision_heads=1, vision_intermediate=32)  # fmt: skip
    (folder / "model.safetensors").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = {"vocab_size": -(-len(tokenizer) // 64) * 64, "eos_token_id": tokenizer.eos_token_id,
              "pad_token_id": tokenizer.pad_token_id}  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        if not images:
            config = AutoConfig.for_model(kind, **TEXT, **tokens, **OF_TEXT[kind])
            model = AutoModelForCausalLM.from_config(config)
        else:
            named = tokenizer.convert_tokens_to_ids
            text, vision = OF_IMAGES[kind]
            config = AutoConfig.for_model(
                kind, text_config={**TEXT, **tokens, **text}, vision_config={**VISION, **vision}, tie_word_embeddings=False,
                image_token_id=named("<|image_pad|>"), video_token_id=named("<|video_pad|>"),
                vision_start_token_id=named("<|vision_start|>"), vision_end_token_id=named("<|vision_end|>"),
            )  # fmt: skip
            model = AutoModelForImageTextToText.from_config(config)
    model.float().save_pretrained(folder)
    return folder
