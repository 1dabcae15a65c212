"""Memory of each role by arithmetic: weights, gradients, optimizer, activations, cache of keys and
values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from rayloop.core.failures import ConfigError
from rayloop.engines.settings import (
    MICRO_BATCH,
    PICTURES_GIB,
    FsdpSettings,
    TransformersEngineSettings,
    VllmEngineSettings,
)
from rayloop.engines.training_settings import LONG
from rayloop.estimate.shape import Shape, read_shape
from rayloop.launch.limits import memory_limit
from rayloop.run.config import RunConfig

BYTES = {"float32": 4, "bfloat16": 2}
MASTER, ADAM = 4, 8
"""Bytes of a parameter's master weight and gradient (float32), and of AdamW's two moments."""
LIGHT, HEAVY = 180 * 2**20, 700 * 2**20
"""Resident bytes, measured on a CPU, of a process without a model (driver, environment, reward) and
of one with torch.
"""
PATCHES = 4
"""Patches of the vision tower for one image token, in Qwen-VL."""
LOGITS = 5
"""Copies of a chunk's logits in float32 that exist at once on a CPU, by measurement; on a GPU one
less (tests/gpu_fake).
"""
ACTIVATIONS, LEAST = 4, 1024
"""The activations of a micro-batch without a configured size get 1/ACTIVATIONS of a CPU's memory,
and LEAST tokens or more.
"""
SYNCS = 3
"""Copies of the weights in the object store at once.

Their pages count for each process that has them mapped, by its share.
"""
HOST = ("process", "weight_sync", "pictures")
"""Parts of a role with GPUs that are in main memory."""
OFFLOADED = ("weights", "gradients", "optimizer")
"""Parts of a rank that are there, too, with ``policy.engine.cpu_offload``; a GPU has what is
gathered of them for a moment.
"""

GIB = 2**30
CARDS = {24: 23.5, 40: 39.4, 48: 47.4, 80: 79.1, 141: 139.8}
"""GB in the name of a card -> GiB that it has."""
CONTEXT = 1.0
"""GiB of CUDA itself in each process."""


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one of ``count`` processes by what they are for; ``gpus``: of its own, where
    ``parts`` lie.
    """

    name: str
    count: int
    gpus: float
    parts: Mapping[str, int] = field(default_factory=dict)
    spare: int = 0
    """Of ``parts`` what an engine of vLLM can do without, decoding fewer sequences together."""
    sleeps: bool = False
    """Whether its parts leave the GPU while others of this kind compute."""
    on_host: tuple[str, ...] = HOST
    """Those of ``parts`` that are in main memory, though the role has GPUs."""

    @property
    def needed(self) -> float:
        """GiB of a GPU without which the role does not work."""
        return (sum(self.of_gpu.values()) - self.spare) / GIB + CONTEXT

    @property
    def of_gpu(self) -> dict[str, int]:
        """The parts that lie on its GPUs."""
        return {
            name: size
            for name, size in self.parts.items()
            if self.gpus and name not in self.on_host
        }

    @property
    def of_host(self) -> dict[str, int]:
        """The parts that lie in main memory."""
        return {
            name: size for name, size in self.parts.items() if not self.gpus or name in self.on_host
        }

    @property
    def bytes(self) -> int:
        """Bytes of all parts, on GPUs and in main memory."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Lengths:
    """Tokens of a trajectory: read, written, those of ``prompt`` that are images'; ``held_out``: an
    evaluation's, if more.
    """

    prompt: int
    response: int
    images: int
    held_out: int = 0

    @property
    def whole(self) -> int:
        """Tokens of the trajectory."""
        return self.prompt + self.response

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that an engine decodes."""
        return max(self.whole, self.held_out)


def on_card(role: RoleMemory, roles: Sequence[RoleMemory]) -> float:
    """GiB of a GPU that the role needs, with all that has a share of the same one: shares that make
    no more than one GPU lie on one. Otherwise the role is taken to have no more than its share.
    """
    shares = [one for one in roles if 0 < one.gpus < 1]
    if role in shares and sum(one.count * one.gpus for one in shares) <= 1:
        turns = [one.count * one.needed for one in shares if one.sleeps]
        return sum(one.count * one.needed for one in shares if not one.sleeps) + max(
            turns, default=0.0
        )
    return role.needed / min(role.gpus, 1.0)


def card(role: RoleMemory, roles: Sequence[RoleMemory]) -> int | None:
    """GB of the smallest card that holds what ``on_card`` says; None: no card does."""
    return next((name for name, has in CARDS.items() if on_card(role, roles) <= has), None)


def memory(config: RunConfig, shape: Shape, lengths: Lengths) -> list[RoleMemory]:
    """One entry for each role, for trajectories of these lengths.

    Of a GPU leave a fifth free for fragmentation, communication and compiled graphs, which are not
    counted.
    """
    policy, rollout, environment, reward = (
        config.policy,
        config.rollout,
        config.environment,
        config.reward,
    )
    sleeps = config.engine.sleep is not None
    roles = [
        RoleMemory("driver", 1, 0, {"process": LIGHT}),
        RoleMemory(
            "policy",
            policy.ranks,
            policy.placement.num_gpus,
            _rank(config, shape, lengths),
            sleeps=sleeps,
            on_host=(*HOST, *OFFLOADED) if policy.engine.cpu_offload else HOST,
        ),
        RoleMemory(
            "rollout",
            rollout.actors,
            rollout.placement.num_gpus,
            *_engine(config, shape, lengths.longest),
            sleeps,
        ),
        RoleMemory(
            "environment", environment.actors, environment.placement.num_gpus, {"process": LIGHT}
        ),
        RoleMemory("reward", reward.actors, reward.placement.num_gpus, {"process": LIGHT}),
    ]
    if config.reference_kind == "actor":
        parts = {
            "process": HEAVY,
            "weights": of_reference(config, shape) * BYTES[policy.engine.dtype],
        }
        roles.append(
            RoleMemory(
                "reference", config.reference.actors, config.reference.placement.num_gpus, parts
            )
        )
    return roles


def of_reference(config: RunConfig, shape: Shape) -> int:
    """Parameters that one reference actor holds: those of ``reference.path``, or of the run's
    model, with this ``shape``.
    """
    reference = config.reference
    if reference.server:
        return 0
    return (
        read_shape(reference.path, None, "reference.path").parameters
        if reference.path
        else shape.parameters
    )


def _rank(config: RunConfig, shape: Shape, lengths: Lengths) -> dict[str, int]:
    """Bytes of one rank: its part of weights, gradients and moments (FSDP), and the activations of
    its micro-batch. Members of a group share their prompt in a micro-batch, unless an episode has
    several turns with observations of their own.
    """
    engine, ranks, algorithm = config.policy.engine, config.policy.ranks, config.algorithm
    trained, shards = shape.trained(engine), ranks // engine.replicas
    copies = algorithm.group_size if config.environment.episode.max_turns > 1 else 1
    group = lengths.prompt * copies + algorithm.group_size * lengths.response
    update = math.ceil(
        algorithm.groups_per_step * group / ranks / config.policy.update.mini_batches
    )
    row = max(min(engine.micro_batch, update), math.ceil(lengths.whole / engine.sequence_parallel))
    on_gpu = config.policy.placement.num_gpus > 0
    images, keys = (
        row * copies * lengths.images // group,
        row * algorithm.group_size * lengths.whole // group,
    )
    kept, layer = _kept(engine, on_gpu, shape, row, keys, images)
    logits = (
        (LOGITS - on_gpu) * 4 * min(engine.logprob_chunk, row) * int(shape.config["vocab_size"])
    )
    return {
        "process": HEAVY,
        "weights": MASTER * (shape.parameters + (trained if engine.lora else 0)) // shards,
        "gradients": MASTER * trained // shards,
        "optimizer": ADAM * trained // shards,
        "gathered": (
            shape.gathered(BYTES[engine.dtype], MASTER, engine.lora is None) if on_gpu else 0
        ),
        "activations": kept + layer,
        "logits": max(0, logits - layer) if on_gpu and engine.recomputes(on_gpu) else logits,
        "weight_sync": _update(config, shape),
    }


def _update(config: RunConfig, shape: Shape) -> int:
    """Of the object store's pages the share of the rank that sends, and of each engine."""
    engine = config.engine
    return (
        SYNCS * shape.parameters * BYTES[engine.dtype] // (1 + config.rollout.actors)
        if engine.holds_model
        else 0
    )


def fitted(
    engine: FsdpSettings, shape: Shape, ranks: int, on_gpu: bool, machine: int | None = None
) -> FsdpSettings:
    """The settings with a micro-batch for ``machine`` bytes (None: this one's limit), if none is
    named and ranks use CPUs. Half of the tokens may stand for images.
    """
    if engine.micro_batch_tokens is not None or on_gpu:
        return engine
    if machine is None:
        limit = memory_limit()
        machine = min([psutil.virtual_memory().total, *([limit.most] if limit else [])])
    try:
        two = activations(engine, on_gpu, shape, 2, 2, 1)
    except KeyError:  # a model that calls its sizes otherwise
        return engine
    tokens = max(LEAST, 2 ** int(math.log2(max(1, machine // ACTIVATIONS // ranks * 2 // two))))
    return (
        engine
        if tokens >= MICRO_BATCH
        else engine.model_copy(update={"micro_batch_tokens": tokens})
    )


def with_micro_batch(config: RunConfig) -> RunConfig:
    """The run with micro-batches that are ``fitted`` to this machine; unchanged for a model of
    unknown size.
    """
    policy = config.policy
    try:
        shape = read_shape(config.model.path, config.model.revision)
    except ConfigError:
        return config
    engine = fitted(policy.engine, shape, policy.ranks, policy.placement.num_gpus > 0)
    return config.model_copy(update={"policy": policy.model_copy(update={"engine": engine})})


def activations(
    engine: FsdpSettings, on_gpu: bool, shape: Shape, tokens: int, keys: int, images: int
) -> int:
    """Bytes that a forward pass over ``tokens`` keeps for the backward pass, ``images`` of them for
    images, and its gradients.
    """
    return sum(_kept(engine, on_gpu, shape, tokens, keys, images))


def _kept(
    engine: FsdpSettings, on_gpu: bool, shape: Shape, tokens: int, keys: int, images: int
) -> tuple[int, int]:
    """The ``activations`` that are kept, and those of the layer whose backward pass runs, which
    begins when the logits are gone.

    For each layer and token 8 hidden vectors (inputs and outputs of the norms, queries, attention
    and its projection, residuals), keys and values, and 4 vectors of the MLP's width (after
    Korthikanti et al., 2022, with a gated MLP, and attention that keeps no matrix). Besides, the
    key and value of each of ``keys``: every member of a group reads its own copy of the prompt's.
    One more layer for the gradients on their way. With checkpointing one hidden vector per layer,
    and a layer with its gradients: 24 hidden vectors (norms are float32), 6 of the MLP's width
    unless it is tiled, and of ``keys`` that are shared one copy for each head (fitted to
    tests/gpu_fake). A frozen tower keeps nothing, another one its pixels and its merger's
    activations, too; it is computed again when the language model's layers are done.
    """
    each, again = BYTES[engine.dtype], engine.recomputes(on_gpu)
    hidden, layers = int(shape.config["hidden_size"]), int(shape.config["num_hidden_layers"])
    cache = shape.cache // layers
    one = tokens * (8 * hidden + cache + 4 * int(shape.config["intermediate_size"])) + keys * cache
    kept, block = layers * one, one
    if again:
        wide = 0 if tokens > LONG else 6 * int(shape.config["intermediate_size"])
        kept, block = (
            tokens * layers * hidden,
            tokens * (24 * hidden + wide) + (2 * hidden * keys if keys > tokens else 0),
        )
    if shape.vision and engine.trains_vision:
        hidden = int(shape.vision.get("hidden_size", 0))
        layers = int(shape.vision.get("depth") or shape.vision.get("num_hidden_layers", 0))
        one = 10 * hidden + 4 * int(shape.vision.get("intermediate_size", 0))
        kept += (
            PATCHES
            * images
            * (layers * (hidden if again else one) + _pixels(shape.vision) * (2 if again else 1))
        )
        kept += PATCHES * images * 6 * hidden if again else 0
        block = max(block, PATCHES * images * one if again else 0)
    return kept * each, block * each


def _pixels(vision: Mapping[str, Any]) -> int:
    """Numbers of one patch: Qwen-VL takes an image for two frames.

    InternVL names both sides of a patch.
    """
    patch = vision.get("patch_size", 14)
    area = math.prod(patch) if isinstance(patch, list) else patch**2
    return int(vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * area)


def _engine(config: RunConfig, shape: Shape, tokens: int) -> tuple[dict[str, int], int]:
    """Bytes of one engine: weights, and the cache of the sequences decoded together; and the part
    of that cache to spare.
    """
    engine = config.engine
    if not engine.holds_model:
        return {"process": HEAVY}, 0
    asked = math.ceil(
        config.algorithm.target
        * (1 + config.algorithm.staleness.max_staleness)
        / config.rollout.actors
    )
    if isinstance(engine, VllmEngineSettings):
        cache = engine.kv_cache_bytes or 0
        together, shards = min(engine.max_sequences, asked), engine.tensor_parallel
    else:
        cache, shards = 0, 1
        together = (
            min(engine.max_sequences, asked)
            if isinstance(engine, TransformersEngineSettings)
            else asked
        )
    each = BYTES[engine.dtype]
    one = shape.cache * each * tokens // shards
    spare = one * (together - 1) if isinstance(engine, VllmEngineSettings) and not cache else 0
    weights, update = shape.parameters * each // shards, _update(config, shape)
    parts = {
        "process": HEAVY,
        "weights": weights,
        "cache": cache or one * together,
        "weight_sync": update,
    }
    if isinstance(engine, VllmEngineSettings) and shape.vision:
        parts["pictures"] = int(engine.extra.get("mm_processor_cache_gb", PICTURES_GIB) * GIB)
    return parts, spare
