"""Settings of the engines and transports. Light: no torch, so that any process can read a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Discriminator, Field, Tag, model_validator

from rayloop.config.model import ModelSettings as ModelSettings
from rayloop.config.settings import SettingsModel

Dtype = Literal["float32", "bfloat16"]


class TransformersEngineSettings(SettingsModel):
    """Generation with Hugging Face transformers: runs everywhere, meant for small models and CPU."""

    kind: Literal["transformers"] = "transformers"
    dtype: Dtype = "float32"
    """Best the trainer's (``policy.engine.dtype``): rounding separates their log-probs."""
    max_batch: int = Field(64, ge=1)
    """Sequences decoded together."""
    batch_wait: float = Field(0.05, ge=0)
    """Seconds without a new request after which a batch that is not full starts."""
    cohort_wait: float = Field(120.0, gt=0)
    """With ``rollout.deterministic``: seconds to wait for the other members of a group (a cohort). Then those that are there fail,
    and are played again each on its own. Raise it when that happens: such a run is not repeated bit for bit."""
    threads: int | None = Field(None, ge=1)
    """Torch threads on CPU; None: the actor's num_cpus."""


class VllmEngineSettings(SettingsModel):
    """Generation with vLLM, in processes of its own below the rollout actor: on GPUs, and on CPU for tests."""

    kind: Literal["vllm"] = "vllm"
    dtype: Dtype = "bfloat16"
    """Best the trainer's (``policy.engine.dtype``): rounding separates their log-probs."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that one engine is spread over; ``rollout.placement.num_gpus`` must be the same."""
    max_model_len: int | None = Field(None, ge=1)
    """Tokens of a prompt and its turn together. None: ``environment.episode.max_tokens``, which is what an episode can need; for a
    judge the model's own limit. Lower it when the cache cannot hold one sequence."""
    memory_fraction: float = Field(0.9, gt=0, le=1)
    """Share of the GPU's memory (on CPU: of the machine's) for weights and cache. Unused with ``kv_cache_bytes``."""
    kv_cache_bytes: int | None = Field(None, gt=0)
    """Size of the cache of keys and values per GPU. Set it on CPU, and when something else shares the GPU."""
    max_sequences: int = Field(256, ge=1)
    """Sequences decoded together."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: starts in seconds, decodes more slowly."""
    inflight: Literal["recompute", "keep_kv"] = "recompute"
    """Requests that run while new weights are loaded continue under them. recompute: their cache is computed anew; keep_kv: they
    keep the one that the old weights made, and no other request sees it."""
    extra: dict[str, Any] = {}
    """Further arguments of vLLM's ``AsyncEngineArgs``, by their names there."""

    @model_validator(mode="after")
    def _own_arguments(self) -> VllmEngineSettings:
        if taken := sorted(self.extra.keys() & _VLLM_ARGUMENTS):
            raise ValueError(f"extra: {', '.join(taken)} follow from other settings, and cannot be given here")
        if sampling := sorted(self.extra.keys() & {"generation_config", "override_generation_config"}):
            raise ValueError(
                f"extra: {sampling[0]} is refused: with top_p, top_k or penalties vLLM would sample from another distribution than "
                "the one whose log-probs are trained. Only rollout.sampling counts"
            )
        return self


_VLLM_ARGUMENTS = frozenset({
    "model", "dtype", "tensor_parallel_size", "max_model_len", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs",
    "enforce_eager", "logprobs_mode", "worker_extension_cls", "mm_processor_kwargs", "trust_remote_code",
})  # fmt: skip
"""What rayloop itself passes to vLLM."""


class SglangEngineSettings(SettingsModel):
    """Generation with SGLang on GPUs, from an environment of its own (constraints-sglang.txt). Written, and not yet run."""

    kind: Literal["sglang"] = "sglang"
    dtype: Dtype = "bfloat16"
    """Best the trainer's (``policy.engine.dtype``): rounding separates their log-probs."""
    bucket_bytes: int = Field(2**30, ge=1)
    """Published tensors are handed to SGLang's processes in parts of at most this size, through GPU memory."""
    extra: dict[str, Any] = {}
    """Further arguments of ``sglang.Engine`` (``tp_size``, ``mem_fraction_static``, ``context_length``, ...)."""


class ServerCall(SettingsModel):
    """A POST request to the server, outside of the OpenAI interface."""

    path: str
    """From the server's root, for example /update_weights_from_disk."""
    body: dict[str, Any] = {}
    """Sent as JSON. ``{folder}`` within a text stands for the model folder with the weights to load."""


class OpenAiHttpEngineSettings(SettingsModel):
    """A server with the OpenAI interface. For evaluation; for training only with ``interface: tokens`` and ``update``."""

    kind: Literal["openai_http"] = "openai_http"
    base_url: str = Field(pattern=r"^https?://")
    """With the version, for example http://host:8000/v1. It must be reachable from the nodes of the rollout actors."""
    model: str
    """The model's name at the server."""
    api_key_env: str | None = None
    """Environment variable that holds the key, on the nodes of the rollout actors."""
    dtype: Dtype = "bfloat16"
    """What the server computes in: decides how far its log-probs may be from the trainer's (``publish.tolerance``)."""
    interface: Literal["chat", "tokens"] = "chat"
    """chat: messages and images go out, text comes back, there are no log-probs; ``model.path`` must have a ChatML template
    (Qwen's). tokens: token ids go out, token ids and log-probs come back, as with vLLM's server, which needs ``--logprobs-mode
    processed_logprobs``; text only."""
    update: tuple[ServerCall, ...] = ()
    """Calls, in order, that make the server load a published model folder and forget its caches. Empty: its weights are its
    own. The server must see the run folder."""
    timeout: float = Field(600.0, gt=0)
    """Seconds for one request."""
    retries: int = Field(5, ge=0)
    """Further attempts when the server cannot be reached, is busy (429) or fails (5xx), after 1, 2, 4, ... seconds."""


def _engine_kind(value: Any) -> str | None:
    """Which engine is meant: ``transformers`` unless ``kind`` says otherwise."""
    if isinstance(value, Mapping):
        return str(value.get("kind", "transformers"))
    return str(getattr(value, "kind", "")) or None


GenerationSettings = Annotated[
    Annotated[TransformersEngineSettings, Tag("transformers")]
    | Annotated[VllmEngineSettings, Tag("vllm")]
    | Annotated[SglangEngineSettings, Tag("sglang")]
    | Annotated[OpenAiHttpEngineSettings, Tag("openai_http")],
    Discriminator(_engine_kind),
]


def serves_its_own_weights(engine: GenerationSettings) -> TypeGuard[OpenAiHttpEngineSettings]:
    """Whether the engine keeps the weights that it has: it can be measured, but not trained."""
    return isinstance(engine, OpenAiHttpEngineSettings) and not engine.update


class OptimizerSettings(SettingsModel):
    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-6, gt=0)
    """Learning rate. The default suits full training of models with billions of parameters; small models and LoRA need more
    (docs/settings.md)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay of the gradient's mean and of its square. A second one of 0.95 forgets faster: for short runs."""
    eps: float = 1e-8
    """AdamW's term against division by 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Pulls weights to 0; with LoRA, the adapter. Seldom needed in short runs."""
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


class LoraSettings(SettingsModel):
    """Train low-rank adapters instead of the model (peft)."""

    rank: int = Field(8, gt=0)
    """Size of the adapters. More can express more, and costs memory (docs/settings.md)."""
    alpha: float = Field(16.0, gt=0)
    """The adapters' output is scaled by alpha / rank: scale both together, or the effective learning rate changes."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Keep 0 for RL: with dropout the trainer's log-probs are not those of the sampled policy."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""
    vision: bool = False
    """Adapt the vision tower's layers of these names too. Matching by name alone does so by accident (Chart-RVR)."""


class FsdpSettings(SettingsModel):
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
    """Compute activations again in the backward pass: less memory, more time. Before a smaller ``micro_batch_tokens`` helps
    no more."""
    cpu_offload: bool = False
    """Keep weights and optimizer states in CPU memory: when they do not fit the GPUs; slow."""
    freeze_vision: bool = False
    """Leave the vision tower as it is: less memory, and it cannot forget. Off when the task needs it to see something new."""
    lora: LoraSettings | None = None
    threads: int | None = Field(None, ge=1)
    """Torch threads per rank on CPU; None: the actor's num_cpus."""
    collective_timeout: float = Field(600.0, gt=0)
    """Seconds after which a collective fails instead of hanging."""
