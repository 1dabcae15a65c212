"""The properties of model families, by transformers' ``model_type``.

A new family is a line here. A causal language model with only attention layers needs none.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

UNADAPTED = "the experts keep their weights: adapters are only on the linear layers outside them"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
VISION = ("visual.", "vision_tower.", "vision_model.")
"""Parts of the names of a vision tower's tensors."""
LEARNED = re.compile(
    r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_embed(ding)?s?)(\.weight)?$"
)
"""The last parts of the names of position tables, in GPT-2, OPT and BERT."""
ATTENDING = frozenset({"full_attention", "sliding_attention", "attention", "dense", "sparse"})
"""Types of layers that keep the trajectories of a packed row apart."""
RECURRENT = ("mamba", "ssm_", "state_size", "linear_conv", "linear_key", "conv_L", "lru_width")
"""The first parts of the names of settings that recurrent layers have."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The properties of a family of models that differ between families."""

    images: Literal["", "patches", "tiles"] = ""
    """The form in which the model takes images; "": it takes none.

    "patches": a grid of patches, one token for a square of them, with M-RoPE positions; "tiles":
    squares of one size, each a separate grid, with the positions of text.
    """
    processor: str = "Qwen2VLImageProcessorPil"
    """transformers' class that turns images into pixels."""
    frames: int = 1
    """The number of frames that an image counts as in the processor's limits.

    With more than one the processor also enlarges sides below an image token's.
    """
    around: tuple[str, ...] = ()
    """The tokens that the processor, not the chat template, writes around an image's."""
    pooled: bool = False
    """Whether image features enter only with the embeddings, and can be cached between turns."""
    packs: bool = True
    """Whether a row can hold several trajectories."""
    experts: Literal["", "each", "transposed"] = ""
    """The form of a mixture of experts in the checkpoint; "": unknown, hence refused.

    Here it has one tensor for each layer, in the checkpoint one for each expert, or transposed.
    """
    adapters: bool = False
    """Whether vLLM computes with adapters of its language model, under the checkpoint's names."""


OTHERS = ModelFamily()
FAMILIES = {
    "qwen2": ModelFamily(adapters=True),
    "qwen3": ModelFamily(adapters=True),
    "qwen2_vl": ModelFamily(images="patches", pooled=True, adapters=True),
    "qwen2_5_vl": ModelFamily(images="patches", pooled=True, adapters=True),
    "qwen3_vl": ModelFamily(images="patches", adapters=True),
    "qwen3_moe": ModelFamily(experts="each"),
    "qwen3_vl_moe": ModelFamily(images="patches", experts="transposed"),
    "glm4v": ModelFamily(
        images="patches", processor="Glm4vImageProcessorPil", frames=2, pooled=True
    ),
    "glm46v": ModelFamily(
        images="patches", processor="Glm46VImageProcessorPil", frames=2, pooled=True
    ),
    "internvl": ModelFamily(
        images="tiles",
        processor="GotOcr2ImageProcessorPil",
        around=("<img>", "</img>"),
        pooled=True,
    ),
    "qwen3_5": ModelFamily(images="patches", pooled=True, packs=False),
    "qwen3_5_text": ModelFamily(packs=False),
    "qwen3_5_moe": ModelFamily(images="patches", pooled=True, packs=False, experts="each"),
    "qwen3_5_moe_text": ModelFamily(packs=False, experts="each"),
}


def family(kind: str) -> ModelFamily:
    """The family of a model_type."""
    return FAMILIES.get(kind, OTHERS)


def experts(text: Mapping[str, Any]) -> int:
    """The experts of a layer by the language model's configuration; 0 for a dense model."""
    return max(int(text.get(name) or 0) for name in EXPERTS)


def unsupported(kind: str, vision: bool, text: Mapping[str, Any], quantised: bool = False) -> str:
    """Why a model of this model_type cannot be trained; "" when it can.

    ``text``: the configuration of its language model.
    """
    model_family = family(kind)
    if quantised:
        return (
            "its weights are quantised, and cannot be trained. Name the model with weights in"
            " bfloat16 or float32"
        )
    number = experts(text)
    if number and not model_family.experts:
        mixtures = ", ".join(sorted(name for name, other in FAMILIES.items() if other.experts))
        return (
            f"{kind} is a mixture of {number} experts, one tensor here and many in its checkpoint:"
            f" no weight sync sends them. Use a dense model, or one of {mixtures}"
        )
    if vision and not model_family.images:
        readers = ", ".join(sorted(name for name, other in FAMILIES.items() if other.images))
        return (
            f"images of {kind!r} models are not supported; use one of {readers}, or a text-only"
            " model"
        )
    layers = _mixing_layers(text)
    if model_family.packs and layers:
        return (
            f"{kind} has layers of {layers}, which would carry one trajectory of a packed row into"
            " the next. Use a model whose layers are all full or sliding attention"
        )
    return ""


def _mixing_layers(text: Mapping[str, Any]) -> str:
    """The layers, or their setting, that see beyond a trajectory's start; "" for none.

    Some configurations name no layers.
    """
    layers = text.get("layer_types") or text.get("layers_block_type")
    if layers:
        return ", ".join(sorted({*layers} - ATTENDING))
    settings = sorted(name for name, value in text.items() if value)
    return next((name for name in settings if name.startswith(RECURRENT)), "")


def positions(text: Mapping[str, Any]) -> int | None:
    """The number of tokens of a text whose positions the model has learned to distinguish.

    ``text``: the configuration of its language model; None where it does not have the number.
    Rotary positions that are stretched (``rope_scaling``) count with their factor.
    """
    limit = text.get("max_position_embeddings") or text.get("n_positions")
    if not limit:
        return None
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    if not factor:
        return int(limit)
    original = int(scaling.get("original_max_position_embeddings") or limit)
    return max(int(limit), int(factor * original))


def learned_positions(names: Iterable[str]) -> bool:
    """Whether the language model of these tensors looks its positions up in a table, which ends."""
    return any(LEARNED.search(name) and not _is_of_vision_tower(name) for name in names)


def _is_of_vision_tower(name: str) -> bool:
    return any(part in f"{name}." for part in VISION)
