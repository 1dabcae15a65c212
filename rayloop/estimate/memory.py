"""Memory of each role by arithmetic.

Weights, gradients, optimizer, activations, and the cache of keys and values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from rayloop.engines.settings import (
    MICRO_BATCH_TOKENS,
    PICTURES_GIB,
    FsdpSettings,
    SglangEngineSettings,
    TransformersEngineSettings,
    VllmEngineSettings,
)
from rayloop.engines.shape import ModelSource, Shape
from rayloop.engines.training_settings import TILED_ABOVE_TOKENS
from rayloop.launch.limits import memory_limit
from rayloop.run.config import RunConfig
from rayloop.run.preflight import Prepared
from rayloop.run.sections import ReferenceSettings

_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element of each type."""
_FLOAT32_BYTES = 4
_MASTER_BYTES = 4
"""Bytes of a parameter's master weight, and of its gradient (float32)."""
_ADAM_BYTES = 8
"""Bytes of a parameter's two moments of AdamW."""
_PROCESS_BYTES = 180 * 2**20
"""Resident bytes of a process without a model (driver, environment, reward), measured on a CPU."""
_TORCH_PROCESS_BYTES = 700 * 2**20
"""Resident bytes of a process with torch, measured on a CPU."""
_PATCHES_PER_TOKEN = 4
"""Patches of the vision tower for one image token, in Qwen-VL."""
_LOGITS_COPIES = 5
"""Copies of a chunk's logits in float32 that exist at once on a CPU, by measurement.

On a GPU there is one less (tests/gpu_fake).
"""
_ACTIVATIONS_DIVISOR = 4
"""The activations of a micro-batch without a configured size get this part of a CPU's memory."""
_MIN_MICRO_BATCH_TOKENS = 1024
_SYNC_COPIES = 3
"""Copies of the weights in the object store at once.

Their pages count for each process that has them mapped, by its share.
"""
HOST = ("process", "weight_sync", "pictures")
"""Parts of a role with GPUs that are in main memory."""
_OFFLOADED = ("weights", "gradients", "optimizer")
"""Parts of a rank that are in main memory too with ``policy.engine.cpu_offload``.

A GPU has the gathered part of them for a moment.
"""

GIB = 2**30
CARDS = {24: 23.5, 40: 39.4, 48: 47.4, 80: 79.1, 141: 139.8}
"""The GiB of a card, by the GB in its name."""
CUDA_CONTEXT_GIB = 1.0
"""GiB of CUDA itself in each process."""


@dataclass(frozen=True)
class RoleMemory:
    """The memory of one of a role's ``count`` processes, in bytes by purpose."""

    name: str
    count: int
    gpus: float
    """GPUs of the process, which hold its ``parts``."""
    parts: Mapping[str, int] = field(default_factory=dict)
    spare: int = 0
    """Bytes of ``parts`` that an engine of vLLM does not need when it decodes fewer sequences."""
    sleeps: bool = False
    """Whether its parts leave the GPU while others of this kind compute."""
    on_host: tuple[str, ...] = HOST
    """The names in ``parts`` that are in main memory, although the role has GPUs."""

    @property
    def needed(self) -> float:
        """GiB of a GPU without which the role does not work."""
        return (sum(self.of_gpu.values()) - self.spare) / GIB + CUDA_CONTEXT_GIB

    @property
    def of_gpu(self) -> dict[str, int]:
        """The parts on its GPUs."""
        return {name: size for name, size in self.parts.items() if not self._is_on_host(name)}

    @property
    def of_host(self) -> dict[str, int]:
        """The parts in main memory."""
        return {name: size for name, size in self.parts.items() if self._is_on_host(name)}

    def _is_on_host(self, part: str) -> bool:
        return not self.gpus or part in self.on_host

    @property
    def bytes(self) -> int:
        """Bytes of all parts, on GPUs and in main memory."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Lengths:
    """Tokens of a trajectory."""

    prompt: int
    """Tokens that the model reads."""
    response: int
    """Tokens that the model writes."""
    images: int
    """Tokens of the prompt that stand for images."""
    held_out: int = 0
    """Tokens of an evaluation's trajectory, if it has more."""

    @property
    def whole(self) -> int:
        """Tokens of the trajectory."""
        return self.prompt + self.response

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that an engine decodes."""
        return max(self.whole, self.held_out)


def on_card(role: RoleMemory, roles: Sequence[RoleMemory]) -> float:
    """GiB of a GPU that the role needs, with all roles that have a share of the same GPU.

    Shares that make no more than one GPU are on one. Otherwise the role is assumed to have no more
    than its share.
    """
    sharing = [peer for peer in roles if 0 < peer.gpus < 1]
    shares = sum(peer.count * peer.gpus for peer in sharing)
    if role not in sharing or shares > 1:
        return role.needed / min(role.gpus, 1.0)
    awake = sum(peer.count * peer.needed for peer in sharing if not peer.sleeps)
    # Roles that sleep take turns on the GPU.
    turns = [peer.count * peer.needed for peer in sharing if peer.sleeps]
    return awake + max(turns, default=0.0)


def card(role: RoleMemory, roles: Sequence[RoleMemory]) -> int | None:
    """GB of the smallest card with the memory of ``on_card``; None when no card has it."""
    needed = on_card(role, roles)
    return next((name for name, gibibytes in CARDS.items() if needed <= gibibytes), None)


def memory(config: RunConfig, shape: Shape, lengths: Lengths) -> list[RoleMemory]:
    """One entry for each role, for trajectories of these lengths.

    Of a GPU leave a fifth free for fragmentation, communication and compiled graphs, which are not
    counted.
    """
    policy = config.policy
    rollout = config.rollout
    environment = config.environment
    reward = config.reward
    light_process = {"process": _PROCESS_BYTES}
    rank_parts = _rank(config, shape, lengths)
    rank_on_host = (*HOST, *_OFFLOADED) if policy.engine.cpu_offload else HOST
    engine_parts, spare = _engine(config, shape, lengths.longest)
    sleeps = config.engine.sleep is not None
    roles = [
        RoleMemory("driver", 1, 0, light_process),
        RoleMemory(
            "policy",
            policy.ranks,
            policy.placement.num_gpus,
            rank_parts,
            sleeps=sleeps,
            on_host=rank_on_host,
        ),
        RoleMemory(
            "rollout", rollout.actors, rollout.placement.num_gpus, engine_parts, spare, sleeps
        ),
        RoleMemory(
            "environment", environment.actors, environment.placement.num_gpus, light_process
        ),
        RoleMemory("reward", reward.actors, reward.placement.num_gpus, light_process),
    ]
    if config.reference_kind == "actor":
        reference = config.reference
        weights = of_reference(reference, shape) * _BYTES[policy.engine.dtype]
        parts = {"process": _TORCH_PROCESS_BYTES, "weights": weights}
        roles.append(RoleMemory("reference", reference.actors, reference.placement.num_gpus, parts))
    return roles


def of_reference(reference: ReferenceSettings, shape: Shape) -> int:
    """Parameters of one reference actor.

    ``reference.path`` has them, or the run's model, with this ``shape``.
    """
    if reference.server:
        return 0
    if reference.path:
        return ModelSource(reference.path, key="reference.path").shape.parameters
    return shape.parameters


def _rank(config: RunConfig, shape: Shape, lengths: Lengths) -> dict[str, int]:
    """Bytes of one rank by purpose.

    Its part of weights, gradients and moments (FSDP), and the activations of its micro-batch.
    Members of a group share their prompt in a micro-batch, unless an episode has several turns with
    separate observations.
    """
    engine = config.policy.engine
    ranks = config.policy.ranks
    algorithm = config.algorithm
    on_gpu = config.policy.placement.num_gpus > 0
    group_size = algorithm.group_size
    prompt_copies = group_size if config.environment.episode.max_turns > 1 else 1
    group_tokens = lengths.prompt * prompt_copies + group_size * lengths.response
    step_tokens = algorithm.groups_per_step * group_tokens
    update_tokens = math.ceil(step_tokens / ranks / config.policy.update.mini_batches)
    # Only sequence parallelism splits a trajectory.
    trajectory_tokens = math.ceil(lengths.whole / engine.sequence_parallel)
    tokens = max(min(engine.micro_batch, update_tokens), trajectory_tokens)
    images = tokens * prompt_copies * lengths.images // group_tokens
    keys = tokens * group_size * lengths.whole // group_tokens
    activation_bytes, layer_bytes = _kept(engine, on_gpu, shape, tokens, keys, images)

    logits_copies = _LOGITS_COPIES - on_gpu
    chunk = min(engine.logprob_chunk, tokens) * int(shape.config["vocab_size"])
    logits = logits_copies * _FLOAT32_BYTES * chunk
    # The logits are freed when the backward pass of a layer computes it again.
    if on_gpu and engine.recomputes(on_gpu):
        logits = max(0, logits - layer_bytes)

    trained = shape.trained(engine)
    weights = shape.parameters + (trained if engine.lora else 0)
    gathered = 0
    if on_gpu:
        gathered = shape.gathered(_BYTES[engine.dtype], _MASTER_BYTES, engine.lora is None)
    shards = ranks // engine.replicas
    return {
        "process": _TORCH_PROCESS_BYTES,
        "weights": _MASTER_BYTES * weights // shards,
        "gradients": _MASTER_BYTES * trained // shards,
        "optimizer": _ADAM_BYTES * trained // shards,
        "gathered": gathered,
        "activations": activation_bytes + layer_bytes,
        "logits": logits,
        "weight_sync": _weight_sync(config, shape),
    }


def _weight_sync(config: RunConfig, shape: Shape) -> int:
    """The share of the object store's pages that the sending rank has, and each engine."""
    engine = config.engine
    if not engine.holds_model:
        return 0
    weights = shape.parameters * _BYTES[engine.dtype]
    return _SYNC_COPIES * weights // (1 + config.rollout.actors)


def fitted(
    engine: FsdpSettings, shape: Shape, ranks: int, on_gpu: bool, machine: int | None = None
) -> FsdpSettings:
    """The settings with a micro-batch for ``machine`` bytes (None: this machine's limit).

    They are unchanged when they have a micro-batch, or ranks use GPUs. Half of the tokens may stand
    for images.
    """
    if engine.micro_batch_tokens is not None or on_gpu:
        return engine
    if machine is None:
        machine = psutil.virtual_memory().total
        limit = memory_limit()
        if limit:
            machine = min(machine, limit.most)
    try:
        bytes_of_two = activations(engine, on_gpu, shape, 2, 2, 1)
    # The model has other names for its sizes.
    except KeyError:
        return engine
    budget = machine // _ACTIVATIONS_DIVISOR // ranks
    fitting_tokens = max(1, budget * 2 // bytes_of_two)
    power_of_two = 2 ** int(math.log2(fitting_tokens))
    tokens = max(_MIN_MICRO_BATCH_TOKENS, power_of_two)
    if tokens >= MICRO_BATCH_TOKENS:
        return engine
    return engine.model_copy(update={"micro_batch_tokens": tokens})


def with_micro_batch(prepared: Prepared) -> Prepared:
    """The run with micro-batches that are ``fitted`` to this machine.

    It is unchanged for a model of unknown size.
    """
    policy = prepared.config.policy
    shape = prepared.model.known_shape
    if shape is None:
        return prepared
    engine = fitted(policy.engine, shape, policy.ranks, policy.placement.num_gpus > 0)
    return prepared.with_sections(policy=policy.model_copy(update={"engine": engine}))


def activations(
    engine: FsdpSettings, on_gpu: bool, shape: Shape, tokens: int, keys: int, images: int
) -> int:
    """Bytes that a forward pass over ``tokens`` keeps for the backward pass, with its gradients.

    ``images`` of the tokens stand for images.
    """
    return sum(_kept(engine, on_gpu, shape, tokens, keys, images))


def _kept(
    engine: FsdpSettings, on_gpu: bool, shape: Shape, tokens: int, keys: int, images: int
) -> tuple[int, int]:
    """The kept ``activations``, and the activations of the layer whose backward pass runs.

    The backward pass of a layer begins after the logits are freed. A frozen vision tower keeps
    nothing.
    """
    recomputes = engine.recomputes(on_gpu)
    numbers, layer_numbers = _kept_by_language_model(shape, tokens, keys, recomputes)
    if shape.vision and engine.trains_vision:
        patches = _PATCHES_PER_TOKEN * images
        vision_kept, vision_block = _kept_by_vision_tower(shape.vision, patches, recomputes)
        numbers += vision_kept
        # The tower is computed again after the language model's layers.
        layer_numbers = max(layer_numbers, vision_block)
    bytes_each = _BYTES[engine.dtype]
    return numbers * bytes_each, layer_numbers * bytes_each


def _kept_by_language_model(
    shape: Shape, tokens: int, keys: int, recomputes: bool
) -> tuple[int, int]:
    """Numbers that the language model keeps, and the numbers of one layer.

    For each layer and token 8 hidden vectors (inputs and outputs of the norms, queries, attention
    and its projection, residuals), keys and values, and 4 vectors of the MLP's width (after
    Korthikanti et al., 2022, with a gated MLP, and attention that keeps no matrix). Besides, the
    key and value of each of ``keys``: every member of a group reads its own copy of the prompt's.
    One more layer for the gradients of the running backward pass. With checkpointing one hidden
    vector per layer, and a layer with its gradients: 24 hidden vectors (norms are float32), 6 of
    the MLP's width unless it is tiled, and one copy for each head of ``keys`` that are shared
    (fitted to tests/gpu_fake).
    """
    hidden = int(shape.config["hidden_size"])
    layers = int(shape.config["num_hidden_layers"])
    width = int(shape.config["intermediate_size"])
    if recomputes:
        is_tiled = tokens > TILED_ABOVE_TOKENS
        layer = tokens * (24 * hidden + (0 if is_tiled else 6 * width))
        are_shared = keys > tokens
        if are_shared:
            layer += 2 * hidden * keys
        return tokens * layers * hidden, layer
    cache = shape.cache // layers
    layer = tokens * (8 * hidden + cache + 4 * width) + keys * cache
    return layers * layer, layer


def _kept_by_vision_tower(
    vision: Mapping[str, Any], patches: int, recomputes: bool
) -> tuple[int, int]:
    """Numbers that a trained vision tower keeps, and the numbers of one layer with checkpointing.

    It keeps the pixels and the activations of its merger too.
    """
    hidden = int(vision.get("hidden_size", 0))
    layers = int(vision.get("depth") or vision.get("num_hidden_layers", 0))
    layer = 10 * hidden + 4 * int(vision.get("intermediate_size", 0))
    pixels = _pixels(vision)
    if not recomputes:
        return patches * (layers * layer + pixels), 0
    merger = 6 * hidden
    return patches * (layers * hidden + 2 * pixels + merger), patches * layer


def _pixels(vision: Mapping[str, Any]) -> int:
    """Numbers of one patch. Qwen-VL takes an image for two frames.

    InternVL names both sides of a patch.
    """
    patch = vision.get("patch_size", 14)
    area = math.prod(patch) if isinstance(patch, list) else patch**2
    return int(vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * area)


def _engine(config: RunConfig, shape: Shape, tokens: int) -> tuple[dict[str, int], int]:
    """Bytes of one engine by purpose, and the part of its cache that it does not need.

    Weights, and the cache of the sequences that are decoded together.
    """
    engine = config.engine
    if not engine.holds_model:
        return {"process": _TORCH_PROCESS_BYTES}, 0
    algorithm = config.algorithm
    trajectories = algorithm.target * (1 + algorithm.staleness.max_staleness)
    sequences = math.ceil(trajectories / config.rollout.actors)
    if isinstance(engine, VllmEngineSettings | TransformersEngineSettings):
        sequences = min(engine.max_sequences, sequences)
    vllm = engine if isinstance(engine, VllmEngineSettings) else None
    shards = vllm.tensor_parallel if vllm else 1
    if isinstance(engine, SglangEngineSettings):
        shards = engine.extra.get("tp_size", 1)
        sequences = min(engine.extra.get("max_running_requests", sequences), sequences)
    bytes_each = _BYTES[engine.dtype]
    sequence_cache = shape.cache * bytes_each * tokens // shards
    configured_cache = (vllm.kv_cache_bytes or 0) if vllm else 0
    parts = {
        "process": _TORCH_PROCESS_BYTES,
        "weights": shape.parameters * bytes_each // shards,
        "cache": configured_cache or sequence_cache * sequences,
        "weight_sync": _weight_sync(config, shape),
    }
    if vllm and shape.vision:
        gibibytes = vllm.extra.get("mm_processor_cache_gb", PICTURES_GIB)
        parts["pictures"] = int(gibibytes * GIB)
    # Where the cache is full, these two let sequences wait.
    sequences_may_wait = isinstance(engine, VllmEngineSettings | SglangEngineSettings)
    is_spare = sequences_may_wait and not configured_cache
    spare = sequence_cache * (sequences - 1) if is_spare else 0
    return parts, spare
