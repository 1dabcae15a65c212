"""The memory that `estimate` computes for a faithful preset, beside the cards that the published
run had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayloop.engines.shape import Shape
from rayloop.estimate.memory import (
    CARDS,
    CUDA_CONTEXT_GIB,
    GIB,
    HOST,
    RoleMemory,
    card,
    memory,
    on_card,
)
from rayloop.estimate.run import TOKEN_PIXELS, lengths, plan
from rayloop.run.config import read

_TOWER = {
    "hidden_size": 1280,
    "depth": 32,
    "intermediate_size": 3420,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "patch_size": 14,
}


def qwen2_5_vl(text: Mapping[str, int], *, tied: bool) -> Shape:
    """Qwen2.5-VL with a language model of these sizes, as config.json names them; ``tied``: without
    a head of its own.
    """
    hidden, wide, vocabulary = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    keys = hidden // text["num_attention_heads"] * text["num_key_value_heads"]
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        sizes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(text["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, out in (("q", hidden), ("k", keys), ("v", keys)):
            sizes |= {
                f"{at}.self_attn.{name}_proj.weight": (out, hidden),
                f"{at}.self_attn.{name}_proj.bias": (out,),
            }
        sizes |= {
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, wide),
        }
        sizes |= {f"{at}.mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
        sizes |= {
            f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
    return Shape(sizes | _tower(hidden), text, _TOWER)


def _tower(out: int) -> dict[str, tuple[int, ...]]:
    """Its tensors: 32 blocks, and the merger of four patches into a vector of ``out`` numbers."""
    hidden, wide, merged = (
        _TOWER["hidden_size"],
        _TOWER["intermediate_size"],
        4 * _TOWER["hidden_size"],
    )
    sizes: dict[str, tuple[int, ...]] = {"visual.patch_embed.proj.weight": (hidden, 3, 2, 14, 14)}
    layers = {
        "attn.qkv": (3 * hidden, hidden),
        "attn.proj": (hidden, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    layers |= {f"mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")}
    named = {
        f"blocks.{block}.{name}": size
        for block in range(_TOWER["depth"])
        for name, size in layers.items()
    }
    for name, size in {
        **named,
        "merger.mlp.0": (merged, merged),
        "merger.mlp.2": (out, merged),
    }.items():
        sizes |= {f"visual.{name}.weight": size, f"visual.{name}.bias": size[:1]}
    norms = [
        f"blocks.{block}.norm{number}" for block in range(_TOWER["depth"]) for number in (1, 2)
    ]
    return sizes | {f"visual.{name}.weight": (hidden,) for name in [*norms, "merger.ln_q"]}


THREE = qwen2_5_vl(
    {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
    },
    tied=True,
)
SEVEN = qwen2_5_vl(
    {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
    tied=False,
)
SHAPES = {
    "Qwen/Qwen2.5-VL-3B-Instruct": THREE,
    "Qwen/Qwen2.5-VL-7B-Instruct": SEVEN,
    "ByteDance-Seed/UI-TARS-1.5-7B": SEVEN,
    "Agents-X/PyVision-Image-7B-SFT": SEVEN,
}
"""Models of the presets: the last two are Qwen2.5-VL-7B, trained on."""


def on_gpus(preset: Path) -> list[RoleMemory]:
    """The roles of a preset that have GPUs, for the longest trajectories that it allows.

    Raises ConfigError.
    """
    config = read(preset, [])
    made = plan(config, None, config.model.max_pixels // TOKEN_PIXELS)
    roles = memory(config, SHAPES[config.model.path], lengths(made))
    return [role for role in roles if role.gpus]


def of_roles(roles: Sequence[RoleMemory]) -> Iterator[list[str]]:
    """The cells of each role: GPUs, GiB of each, what they are, and the smallest card."""
    for role in roles:
        of = {
            name: size / GIB
            for name, size in role.parts.items()
            if name not in HOST and size >= 0.05 * GIB
        }
        of |= {"cache": of["cache"] - role.spare / GIB} if role.spare else {}
        parts = ", ".join(
            f"{name} {size:.1f}" for name, size in {**of, "CUDA": CUDA_CONTEXT_GIB}.items()
        )
        more = f"; {role.spare / GIB:.1f} more for all sequences at once" if role.spare else ""
        shared = " for all that share it" if on_card(role, roles) > role.needed else ""
        smallest = f"{card(role, roles)} GB{shared}"
        yield [
            role.name,
            f"{role.count} x {role.gpus:g}",
            f"{role.needed:.1f}",
            f"{parts}{more}",
            smallest,
        ]


def of_cards(
    roles: Sequence[RoleMemory], cards: Sequence[Mapping[str, Any]]
) -> Iterator[list[str]]:
    """The cells of each kind of cards that the published run had: which they are, whether the
    preset fits them, and why not.
    """
    gpus = sum(role.count * role.gpus for role in roles)
    for one in cards:
        count, size = one["gpus"], one["gb"]
        why = [f"{gpus:g} GPUs are asked for"] if count is not None and gpus > count else []
        if size is not None:
            large = {
                role.name: on_card(role, roles)
                for role in roles
                if on_card(role, roles) > CARDS[size]
            }
            why += [
                f"{name} needs {needed:.1f} GiB of {CARDS[size]}" for name, needed in large.items()
            ]
        unknown = [name for name, value in (("number", count), ("card", size)) if value is None]
        fits = (
            "no"
            if why
            else f"unknown: no {' and no '.join(unknown)} is named"
            if unknown
            else "yes"
        )
        named = f"{count or '?'} x {f'{size} GB' if size else '?'}"
        yield [f"{named} ({one['from']})", fits, "; ".join(why)]
