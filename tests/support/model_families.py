"""Tiny models of random weights of every family of models, in the layout of a real checkpoint."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Glm4vImageProcessorPil,
    Glm46VImageProcessorPil,
    GotOcr2ImageProcessorPil,
)

from rayloop.core.model_families import FAMILIES, OTHERS
from rayloop.engines.tiny_vlm import CHAT_TEMPLATE, write_tiny_vlm

TEXTS = [f"What is {i} + {3 * i}? The answer is {4 * i}. Click the red button." for i in range(100)]
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 1,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.1,
}
DEEP = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
MROPE = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [4, 6, 6]}
NARROW = {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3]}}
"""The attention of Qwen2-VL reads no ``head_dim``: its heads are the hidden size shared among them.
"""
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 32}
ALL_ROTARY = {**MROPE, "partial_rotary_factor": 1.0}
GLM = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {**MROPE, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
}
"""Its heads are the hidden size shared among them, half of each is rotated, which vLLM takes for
granted.
"""
NO_DEPTH = {"num_position_embeddings": 64}
GLM_TEMPLATE = """\
[gMASK]<sop>{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""
"""As of GLM-4.1V: no token closes a turn."""
GLM_TOKENS = [
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|video|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
]
INTERNVL_TEMPLATE = CHAT_TEMPLATE.replace(
    "'<|vision_start|><|image_pad|><|vision_end|>'", "'<IMG_CONTEXT>\\n'"
)
"""Its processor writes the tokens around an image."""
TILE = 56
OF_TEXT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "gemma3_text": {"sliding_window": 8, "final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 5.0, "attention_dropout": 0.5},
    "gpt2": {"resid_pdrop": 0.5},
    "gpt_neox": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_5_text": {**LINEAR, "rope_parameters": ALL_ROTARY},
    "qwen3_5_moe_text": {**LINEAR, **SHARED, "rope_parameters": ALL_ROTARY},
}
OF_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (NARROW, {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}),
    "qwen2_5_vl": (NARROW, {"window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ({"rope_parameters": MROPE}, DEEP),
    "qwen3_vl_moe": ({"rope_parameters": MROPE, **EXPERTS, "moe_intermediate_size": 24}, DEEP),
    # As in the published config.json: without the key vLLM has no biases and skips the model's.
    "glm4v": ({**GLM, "attention_bias": True}, {"image_size": 56}),
    "glm46v": (GLM, {"image_size": 56}),
    "internvl": (
        {"model_type": "qwen3"},
        {
            "image_size": [TILE, TILE],
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "initializer_range": 0.1,
        },
    ),
    "qwen3_5": ({"rope_parameters": ALL_ROTARY, **LINEAR}, NO_DEPTH),
    "qwen3_5_moe": ({"rope_parameters": ALL_ROTARY, **LINEAR, **SHARED}, NO_DEPTH),
}
"""What a family adds to the language model and to the vision tower.

Transformers reads from the shape whether experts are transposed, so those of qwen3_vl_moe must not
be square.
"""
GLM_IMAGE = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>")
WRITTEN: dict[str, tuple[str, tuple[str, str, str], Any]] = {
    "glm4v": (GLM_TEMPLATE, GLM_IMAGE, Glm4vImageProcessorPil()),
    "glm46v": (GLM_TEMPLATE, GLM_IMAGE, Glm46VImageProcessorPil()),
    "internvl": (
        INTERNVL_TEMPLATE,
        ("<IMG_CONTEXT>", "<img>", "</img>"),
        GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}),
    ),
}
"""The chat template, the token of images and those around them, and the processor, where they are
not Qwen-VL's.
"""
PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "glm4v": "Glm4vProcessor",
    "glm46v": "Glm46VProcessor",
    "internvl": "InternVLProcessor",
}
"""vLLM's, of text and images; Qwen3VLProcessor for the others."""
KINDS = (*OF_TEXT, *OF_IMAGES)
VLLM: tuple[str, ...] = ("qwen3_moe", "glm4v")
"""Those that vLLM's release for CPUs loads as they are exported here, and samples from with the
trainer's log-probs.
"""


def limit(kind: str) -> float:
    """How far log-probs of engine and trainer may be apart, in float32.

    Qwen3.5's linear attention is computed in chunks of 64 tokens by the trainer and token by token
    by the engine: in float64 these differ by 1e-15 of the output, in float32 by 2e-6, and log-probs
    by 3.4e-5.
    """
    return 1e-5 if FAMILIES.get(kind, OTHERS).packs else 5e-5


def table() -> str:
    """The families and what this suite holds them to, for docs/bring_your_own/model.md."""
    groups = defaultdict[tuple[str, ...], list[str]](list)
    for kind, one in FAMILIES.items():
        held = (bool(one.images), one.packs, True)
        said = (
            *("✓" if each else "–" for each in held),
            f"{limit(kind):.0e}",
            "✓" if kind in VLLM else "–",
        )
        groups[said].append(f"`{kind}`")
    rows = [
        ("`model_type`", "images", "packed rows", "trains", "log-probs within", "vLLM on CPU"),
        ("---",) * 6,
    ]
    return "".join(
        f"| {' | '.join(row)} |\n"
        for row in [*rows, *((", ".join(kinds), *said) for said, kinds in groups.items())]
    )


def write(kind: str, folder: Path) -> Path:
    """A folder of this model_type; its vision model has images of 14-pixel patches."""
    images = kind in OF_IMAGES
    write_tiny_vlm(
        folder,
        TEXTS,
        vision=images,
        hidden=32,
        heads=1,
        layers=1,
        intermediate=32,
        vision_depth=1,
        vision_hidden=32,
        vision_heads=1,
        vision_intermediate=32,
    )
    (folder / "model.safetensors").unlink()
    named = _written(kind, folder) if images else {}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        if not images:
            config = AutoConfig.for_model(kind, **TEXT, **tokens, **OF_TEXT[kind])
            model = AutoModelForCausalLM.from_config(config)
        else:
            text, vision = OF_IMAGES[kind]
            config = AutoConfig.for_model(
                kind,
                text_config={**TEXT, **tokens, **text},
                vision_config={**({} if kind == "internvl" else VISION), **vision},
                tie_word_embeddings=False,
                **named,
            )
            model = AutoModelForImageTextToText.from_config(config)
    model.float().save_pretrained(folder)
    return folder


def _written(kind: str, folder: Path) -> dict[str, int]:
    """Write the family's tokens, chat template and processor; returns the ids that its config.json
    names.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (image, start, end), around = (
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        ("vision",),
    )
    if kind in WRITTEN:
        tokenizer.chat_template, (image, start, end), processor = WRITTEN[kind]
        tokenizer.add_tokens([image, start, end], special_tokens=True)
        if kind == "internvl":
            names = ("start_image_token", "end_image_token", "context_image_token", "video_token")
            tokenizer.init_kwargs["extra_special_tokens"] = dict(
                zip(names, (start, end, image, "<|video_pad|>"), strict=True)
            )
            (folder / "processor_config.json").write_text(
                json.dumps({"image_seq_length": (TILE // 28) ** 2}), encoding="utf-8"
            )
        else:
            tokenizer.add_tokens(GLM_TOKENS, special_tokens=True)
            around = ("image", "video")
        tokenizer.save_pretrained(folder)
        processor.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    described = json.loads(file.read_text(encoding="utf-8")) | {
        "processor_class": PROCESSORS.get(kind, "Qwen3VLProcessor")
    }
    file.write_text(json.dumps(described), encoding="utf-8")
    ids = {"image_token_id": image, "video_token_id": "<|video_pad|>"}
    for what in around:
        ids |= {f"{what}_start_token_id": start, f"{what}_end_token_id": end}
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()}
