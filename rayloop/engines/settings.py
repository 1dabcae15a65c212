"""Settings of the engines and transports. Light: no torch, so that any process can read a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayloop.core.config import Settings
from rayloop.core.model import ModelSettings as ModelSettings

Dtype = Literal["float32", "bfloat16"]


class TransformersEngineSettings(Settings):
    """Generation with Hugging Face transformers: runs everywhere, meant for small models and CPU."""

    kind: Literal["transformers"] = "transformers"
    dtype: Dtype = "float32"
    max_batch: int = Field(64, ge=1)
    """Sequences decoded together."""
    batch_wait: float = Field(0.05, ge=0)
    """Seconds without a new request after which a batch that is not full starts."""
    cohort_wait: float = Field(120.0, gt=0)
    """Deterministic mode: seconds to wait for a cohort's missing members before its batch starts without them."""
    threads: int | None = Field(None, ge=1)
    """Torch threads on CPU; None: the actor's num_cpus."""


GenerationSettings = TransformersEngineSettings


class OptimizerSettings(Settings):
    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    """Optimizer updates over which the learning rate grows linearly from lr / warmup_steps to lr."""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """After the warm-up. wsd (warm-up, stable, decay): constant, then linear to the minimum over ``decay_fraction``."""
    total_updates: int | None = Field(None, gt=0)
    """Length of the schedule in optimizer updates, warm-up included; required by cosine and wsd."""
    decay_fraction: float = Field(0.3, gt=0, le=1)
    """Last part of ``total_updates`` over which wsd decays."""
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """Minimum of cosine and wsd, as a fraction of ``lr``."""
    grad_clip: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    max_skipped: int = Field(3, ge=0)
    """Updates in a row that may be skipped because the gradient is not finite, before the run stops."""

    @model_validator(mode="after")
    def _length(self) -> OptimizerSettings:
        if self.schedule != "constant" and self.total_updates is None:
            raise ValueError(f"schedule: {self.schedule} needs total_updates (steps * epochs * mini_batches)")
        return self


class LoraSettings(Settings):
    """Train low-rank adapters instead of the model (peft)."""

    rank: int = Field(8, gt=0)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    """Keep 0 for RL: with dropout the trainer's log-probs are not those of the sampled policy."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    vision: bool = False
    """Adapt the vision tower's layers of these names too. Matching by name alone does so by accident (Chart-RVR)."""


class FsdpSettings(Settings):
    """Training with PyTorch FSDP2: gloo on CPU, NCCL on GPU, the same code."""

    kind: Literal["fsdp"] = "fsdp"
    dtype: Dtype = "float32"
    """Compute type. Master weights and optimizer states stay float32: a learning rate of 1e-6 vanishes in bfloat16."""
    micro_batch_tokens: int = Field(16_384, gt=0)
    """Packed tokens per forward and backward. Lower it when memory runs out."""
    packing: bool = True
    """Pack trajectories into one row without padding. Off: one trajectory per micro-batch (for comparison)."""
    logprob_chunk: int = Field(2048, gt=0)
    """Positions whose logits exist at the same time: [T, vocabulary] is never held."""
    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    freeze_vision: bool = False
    lora: LoraSettings | None = None
    threads: int | None = Field(None, ge=1)
    """Torch threads per rank on CPU; None: the actor's num_cpus."""
    collective_timeout: float = Field(600.0, gt=0)
    """Seconds after which a collective fails instead of hanging."""


class ObjectStoreTransport(Settings):
    """Weights travel through Ray's object store, owned by the driver. Works everywhere."""

    kind: Literal["object_store"] = "object_store"


class FilesystemTransport(Settings):
    """Weights travel as safetensors files below the run folder, which all nodes must see."""

    kind: Literal["filesystem"] = "filesystem"


class CollectiveTransport(Settings):
    """Weights are broadcast in a process group of the policy's first rank and all rollout actors, for many nodes.

    The object store keeps a copy from which a replaced rollout actor catches up, and all of them when a broadcast fails.
    """

    kind: Literal["collective"] = "collective"
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: from CPU memory over TCP. nccl: from GPU to GPU; every rollout actor needs a GPU of its own, and so does the
    policy's first rank."""
    bucket_bytes: int = Field(2**30, ge=2**10)
    """Tensors travel together in buckets of this size; a larger tensor has one of its own."""
    timeout: float = Field(60.0, gt=0)
    """Seconds that a member waits for the others, to meet and for each bucket, before the broadcast fails. Must be less than
    ``publish.timeout``."""


class CudaIpcTransport(Settings):
    """Weights stay on the GPU, which the policy's only rank and the rollout actors share, and are opened from there.

    The policy keeps a second copy of them in GPU memory. Written, and not yet run.
    """

    kind: Literal["cuda_ipc"] = "cuda_ipc"


TransportSettings = Annotated[
    ObjectStoreTransport | FilesystemTransport | CollectiveTransport | CudaIpcTransport, Field(discriminator="kind")
]
