"""What the families of models have in common and what not, by transformers' ``model_type``; a new
family is a line here. A causal language model of attention alone needs none.
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
"""How the names of tables of positions end, in GPT-2, OPT and BERT."""
ATTENDING = frozenset({"full_attention", "sliding_attention", "attention", "dense", "sparse"})
"""Types of layers that keep the trajectories of a packed row apart."""
RECURRENT = ("mamba", "ssm_", "state_size", "linear_conv", "linear_key", "conv_L", "lru_width")
"""How the names of settings begin that recurrent layers have."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """``images``: how the model takes them, "": not at all.

    "patches": a grid of patches, one token for a square of them, with M-RoPE positions; "tiles":
    squares of one size, each a grid of its own, with the positions of text. ``processor``:
    transformers' class that makes pixels of them. ``frames``: how many frames an image counts as in
    the processor's limits; more than one: it also enlarges sides below an image token's.
    ``around``: the tokens that the processor, not the chat template, writes around those of an
    image. ``pooled``: their features enter only with the embeddings, so that they can be cached
    between turns. ``packs``: a row holds several trajectories, else one. ``experts``: how the
    checkpoint has the tensors of a mixture of experts, one for each layer here: one for each
    expert, or transposed; "": not known, hence refused. ``adapters``: vLLM computes with adapters
    of its language model, under the checkpoint's names.
    """

    images: Literal["", "patches", "tiles"] = ""
    processor: str = "Qwen2VLImageProcessorPil"
    frames: int = 1
    around: tuple[str, ...] = ()
    pooled: bool = False
    packs: bool = True
    experts: Literal["", "each", "transposed"] = ""
    adapters: bool = False


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
    """How many a layer has, by the configuration of the language model; 0 for a dense one."""
    return max(int(text.get(name) or 0) for name in EXPERTS)


def unsupported(kind: str, vision: bool, text: Mapping[str, Any], quantised: bool = False) -> str:
    """Why a model of this model_type cannot be trained; "" when it can.

    ``text``: the configuration of its language model.
    """
    known = family(kind)
    if quantised:
        return (
            "its weights are quantised, and cannot be trained. Name the model with weights in"
            " bfloat16 or float32"
        )
    if (number := experts(text)) and not known.experts:
        mixtures = ", ".join(sorted(name for name, one in FAMILIES.items() if one.experts))
        return (
            f"{kind} is a mixture of {number} experts, one tensor here and many in its checkpoint:"
            f" no weight sync sends them. Use a dense model{mixtures and ', or one of ' + mixtures}"
        )
    if vision and not known.images:
        readers = ", ".join(sorted(name for name, one in FAMILIES.items() if one.images))
        return (
            f"images of {kind!r} models are not supported; use one of {readers}, or a text-only"
            " model"
        )
    if known.packs and (layers := _mixing(text)):
        return (
            f"{kind} has layers of {layers}, which would carry one trajectory of a packed row into"
            " the next. Use a model whose layers are all full or sliding attention"
        )
    return ""


def _mixing(text: Mapping[str, Any]) -> str:
    """The layers, or their setting, that see beyond a trajectory's start; "" for none.

    Some configurations name no layers.
    """
    layers = text.get("layer_types") or text.get("layers_block_type")
    if layers:
        return ", ".join(sorted({*layers} - ATTENDING))
    return next(
        (name for name, value in sorted(text.items()) if value and name.startswith(RECURRENT)), ""
    )


def positions(text: Mapping[str, Any]) -> int | None:
    """How many tokens of a text the model has learned to distinguish, by the configuration of its
    language model; None where it does not say. Rotary positions that are stretched
    (``rope_scaling``) count with their factor.
    """
    known = text.get("max_position_embeddings") or text.get("n_positions")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    if not known or not factor:
        return int(known) if known else None
    return max(
        int(known), int(factor * int(scaling.get("original_max_position_embeddings") or known))
    )


def learned_positions(names: Iterable[str]) -> bool:
    """Whether a model with tensors of these names looks its language model's positions up in a
    table, which ends.
    """
    return any(
        LEARNED.search(name) and not any(part in f"{name}." for part in VISION) for name in names
    )
