"""Memory of each role by arithmetic: weights, gradients, optimizer, activations, cache of keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayloop.engines.settings import TransformersEngineSettings, VllmEngineSettings
from rayloop.estimate.shape import Shape
from rayloop.run.config import RunConfig

BYTES = {"float32": 4, "bfloat16": 2}
MASTER, ADAM = 4, 8
"""Bytes of a parameter's master weight and gradient (float32), and of AdamW's two moments."""
LIGHT, HEAVY = 180 * 2**20, 700 * 2**20
"""Resident bytes of a process without a model: driver, environment, reward; and of those with torch, which
compute: measured on a CPU (docs/choosing_settings.md)."""
PATCHES = 4
"""Patches of the vision tower for one image token, in Qwen-VL."""
LOGITS = 3
"""Copies of a chunk's logits that exist at once: themselves, their softmax, their gradient."""


GIB = 2**30
CARDS = {24: 23.5, 40: 39.4, 48: 47.4, 80: 79.1, 141: 139.8}
"""GB by which a card is called -> GiB that it has."""
CONTEXT = 1.0
"""GiB of CUDA itself in each process."""


@dataclass(frozen=True)
class Role:
    """Bytes of one of ``count`` processes by what they are for; ``gpus``: of its own, where ``parts`` lie."""

    name: str
    count: int
    gpus: float
    parts: Mapping[str, int] = field(default_factory=dict)
    spare: int = 0
    """Of ``parts`` what an engine of vLLM can do without, decoding fewer sequences together."""

    @property
    def card(self) -> int | None:
        """GB of the smallest card that holds what the role needs; None: no card does. Of a share of a card, the whole one."""
        needed = (self.bytes - self.parts["process"] - self.spare) / GIB + CONTEXT
        return next((name for name, has in CARDS.items() if needed <= has * min(self.gpus, 1.0)), None)

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Lengths:
    """Tokens of a trajectory: of what the policy reads, of what it writes, and how many of those it reads stand for images."""

    prompt: int
    response: int
    images: int

    @property
    def whole(self) -> int:
        return self.prompt + self.response


def memory(config: RunConfig, shape: Shape, lengths: Lengths) -> list[Role]:
    """One entry for each role, for trajectories of these lengths.

    On GPUs the parts but ``process`` lie there. Fragmentation, communication and compiled graphs are not in it: leave a fifth free.
    """
    policy, rollout, environment, reward = config.policy, config.rollout, config.environment, config.reward
    roles = [
        Role("driver", 1, 0, {"process": LIGHT}),
        Role("policy", policy.ranks, policy.placement.num_gpus, _rank(config, shape, lengths)),
        Role("rollout", rollout.actors, rollout.placement.num_gpus, *_engine(config, shape, lengths.whole)),
        Role("environment", environment.actors, environment.placement.num_gpus, {"process": LIGHT}),
        Role("reward", reward.actors, reward.placement.num_gpus, {"process": LIGHT}),
    ]
    if config.reference.kind == "actor":
        parts = {"process": HEAVY, "weights": shape.parameters * BYTES[policy.engine.dtype]}
        roles.append(Role("reference", config.reference.actors, config.reference.placement.num_gpus, parts))
    return roles


def _rank(config: RunConfig, shape: Shape, lengths: Lengths) -> dict[str, int]:
    """Of one rank: FSDP keeps a part of weights, gradients and moments, and the activations of its own micro-batch.

    Members of a group share their prompt in a micro-batch (of several turns each has its own observations), which is no longer than
    what a rank has of an update.
    """
    engine, ranks, algorithm = config.policy.engine, config.policy.ranks, config.algorithm
    trained = shape.trained(engine)
    copies = algorithm.group_size if config.environment.episode.max_turns > 1 else 1
    group = lengths.prompt * copies + algorithm.group_size * lengths.response
    update = math.ceil(algorithm.groups_per_step * group / ranks / config.policy.update.mini_batches)
    row = max(min(engine.micro_batch_tokens, update), lengths.whole)
    moments = ADAM if config.policy.optimizer.kind == "adamw" else 0
    return {
        "process": HEAVY,
        "weights": MASTER * (shape.parameters + (trained if engine.lora else 0)) // ranks,
        "gradients": MASTER * trained // ranks,
        "optimizer": moments * trained // ranks,
        "activations": activations(
            config,
            shape,
            row,
            row * algorithm.group_size * lengths.whole // group,
            row * copies * lengths.images // group,
        ),
        "logits": LOGITS * 4 * min(engine.logprob_chunk, row) * int(shape.config["vocab_size"]),
    }


def activations(config: RunConfig, shape: Shape, tokens: int, keys: int, images: int) -> int:
    """Bytes that a forward pass over ``tokens`` keeps for the backward pass, ``images`` of them for images, and its gradients.

    For each layer and token 8 hidden vectors (inputs and outputs of the norms, queries, attention and its projection, residuals),
    keys and values, and 4 vectors of the MLP's width (after Korthikanti et al., 2022, with a gated MLP, and attention that keeps no
    matrix). Besides, the key and value of each of ``keys``: every member of a group reads its own copy of the prompt's. One more
    layer for the gradients on their way. With checkpointing one hidden vector per layer, one whole layer and its gradients. A
    frozen tower keeps nothing, another one its pixels, too.
    """
    engine, each = config.policy.engine, BYTES[config.policy.engine.dtype]
    again = engine.recomputes(config.policy.placement.num_gpus > 0)
    hidden, layers = int(shape.config["hidden_size"]), int(shape.config["num_hidden_layers"])
    cache = shape.cache // layers
    one = tokens * (8 * hidden + cache + 4 * int(shape.config["intermediate_size"])) + keys * cache
    kept = tokens * layers * hidden + 2 * one if again else (layers + 1) * one
    adapts_vision = engine.lora is None or engine.lora.vision
    if shape.vision and adapts_vision and not engine.freeze_vision:
        hidden, layers = int(shape.vision.get("hidden_size", 0)), int(shape.vision.get("depth", 0))
        one = 10 * hidden + 4 * int(shape.vision.get("intermediate_size", 0))
        kept += PATCHES * images * (layers * hidden + one if again else layers * one)
        kept += PATCHES * images * _pixels(shape.vision)
    return kept * each


def _pixels(vision: Mapping[str, Any]) -> int:
    """Numbers of one patch: Qwen-VL takes an image for two frames."""
    sizes = (("in_channels", 3), ("temporal_patch_size", 2), ("patch_size", 14), ("patch_size", 14))
    return math.prod(int(vision.get(name, usual)) for name, usual in sizes)


def _engine(config: RunConfig, shape: Shape, tokens: int) -> tuple[dict[str, int], int]:
    """Of one engine: its weights, and the cache of as many sequences as it decodes together, no more than a step can ask of it; and
    what of that cache it can do without."""
    engine = config.engine
    if not engine.holds_model:
        return {"process": HEAVY}, 0
    asked = math.ceil(config.algorithm.target * (1 + config.algorithm.staleness.max_staleness) / config.rollout.actors)
    if isinstance(engine, VllmEngineSettings):
        cache = engine.kv_cache_bytes or 0
        together, shards = min(engine.max_sequences, asked), engine.tensor_parallel
    else:
        cache, shards = 0, 1
        together = min(engine.max_batch, asked) if isinstance(engine, TransformersEngineSettings) else asked
    each = BYTES[engine.dtype]
    one = shape.cache * each * tokens // shards
    spare = one * (together - 1) if isinstance(engine, VllmEngineSettings) and not cache else 0
    return {"process": HEAVY, "weights": shape.parameters * each // shards, "cache": cache or one * together}, spare
