"""Settings of the engines: the table of those that generate. Light: no torch, so that any process can read a configuration."""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, Tag, model_validator

from rayloop.config.explain import kind_of
from rayloop.config.model import Computes, ComputesOnCpu, Dtype
from rayloop.config.model import ModelSettings as ModelSettings
from rayloop.config.settings import OWN, Component, SettingsModel, by_kind
from rayloop.core.protocols import GenerationEngine
from rayloop.core.types import Sampling


class EngineChoice(Computes):
    """Base of the settings of every generation engine, with the properties that other parts of the system ask for."""

    implementation: ClassVar[str]
    """``module:Class``, imported where it is needed (``rayloop.engines.settings``)."""
    cohorts: ClassVar[bool] = False
    """Whether it decodes a group as a batch of its own, as ``rollout.deterministic`` asks for."""
    starts_slowly: ClassVar[bool] = False
    """Whether it has processes of its own and starts in minutes: ``try`` takes transformers in its place."""
    returns_kept: ClassVar[bool] = False
    """Whether a turn comes with the tokens that ``top_p`` and ``top_k`` kept."""
    holds_model: ClassVar[bool] = True
    """Whether the model is in the memory of the rollout actor's node."""

    dtype: Dtype = "bfloat16"
    """As ``policy.engine.dtype``: rounding separates their log-probs."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return kind_of(type(self)) or type(self).__name__

    @property
    def own_weights(self) -> str:
        """Which weights answer, for an engine whose weights never change; empty for one that loads new weights."""
        return ""

    def untrainable(self) -> str:
        """Why its answers cannot be trained on, or nothing."""
        return ""

    def problems(self, gpus: float, room: int) -> Iterator[str]:
        """Yields what is wrong, for an actor with ``gpus`` and episodes of up to ``room`` tokens."""
        yield from ()

    def unkept(self, sampling: Sampling, where: str) -> Iterator[str]:
        """Yields what is wrong with ``top_p`` or ``top_k`` of the run, or ``where`` else."""
        if sampling.most_kept is not None and not self.returns_kept:
            key = "top_p" if sampling.top_p < 1 else "top_k"
            yield (
                f"rollout.sampling.{key} is {getattr(sampling, key)}{where}: engine.kind: {self.label} does not return the tokens "
                "that were kept, over which log-probs are computed. Use transformers or vllm, or leave top_p and top_k out"
            )

    def placed(self, gpus: float, tokens: int) -> EngineChoice:
        """These settings for an actor with ``gpus``, and with room for episodes of so many tokens, unless they say otherwise."""
        return self


class TransformersEngineSettings(EngineChoice, ComputesOnCpu):
    """Generation with Hugging Face transformers: runs everywhere, meant for small models and CPU."""

    implementation = "rayloop.engines.generation.transformers:TransformersEngine"
    cohorts = returns_kept = True
    kind: Literal["transformers"] = "transformers"
    dtype: Dtype = "float32"
    """As ``policy.engine.dtype``: rounding separates their log-probs."""
    max_sequences: int = Field(64, ge=1)
    """Sequences decoded together. Lower it when memory runs out; raise it towards a step's trajectories for speed."""


MOST = 0.9
"""Share of a GPU for vLLM's weights and cache."""
LITTLE = 0.01
"""The same with ``kv_cache_memory_bytes``, which sets the cache's size: vLLM only checks at its start that this share is free."""


class VllmEngineSettings(EngineChoice):
    """Generation with vLLM, in processes of its own below the rollout actor: on GPUs, and on CPU for tests."""

    implementation = "rayloop.engines.generation.vllm:VllmEngine"
    starts_slowly = returns_kept = True
    kind: Literal["vllm"] = "vllm"
    max_sequences: int = Field(256, ge=1)
    """Sequences decoded together. Lower it when memory runs out; above a step's trajectories per engine it does nothing."""
    extra: dict[str, Any] = {}
    """Further arguments of vLLM's ``AsyncEngineArgs``, by their names there. ``gpu_memory_utilization``: share of the GPU's memory
    (on CPU: of the machine's) that must be free at the start, 0.9 by default; lower it when something else needs that memory.
    ``kv_cache_memory_bytes``: size of the cache per GPU, which then decides alone; set it on CPU and on a shared GPU.
    ``tensor_parallel_size``: by default the actor's ``num_gpus``. ``max_model_len``: by default ``environment.episode.max_tokens``.
    ``enforce_eager: true``: no compilation and no CUDA graphs; it starts in seconds, and decodes more slowly.
    ``return_sampling_mask: true`` (vLLM's Model Runner V2): less work for ``top_p`` and ``top_k``; greedy log-probs are 0."""

    _gpus: float = PrivateAttr(0.0)
    _tokens: int | None = PrivateAttr(None)

    @property
    def tensor_parallel(self) -> int:
        """GPUs that one engine is spread over: those of its actor, divided by the stages of a pipeline."""
        return int(self.extra.get("tensor_parallel_size") or max(1, self._gpus // self.pipeline_parallel))

    @property
    def pipeline_parallel(self) -> int:
        """Stages of the pipeline."""
        return int(self.extra.get("pipeline_parallel_size", 1))

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a prompt and its turn together; None: the model's own limit."""
        return self.extra.get("max_model_len", self._tokens)

    @property
    def memory_fraction(self) -> float:
        """Share of the GPU's memory that vLLM wants free at its start."""
        return float(self.extra.get("gpu_memory_utilization", LITTLE if self.kv_cache_bytes else MOST))

    @property
    def kv_cache_bytes(self) -> int | None:
        """Size of the cache of keys and values per GPU; None: what is left of the memory."""
        return self.extra.get("kv_cache_memory_bytes")

    @model_validator(mode="after")
    def _own_arguments(self) -> VllmEngineSettings:
        for name, kind in _NUMBERS.items():
            if name in self.extra and (not isinstance(self.extra[name], kind) or self.extra[name] <= 0):
                raise ValueError(f"extra: {name} is {self.extra[name]!r}, expected a number above 0")
        if taken := sorted(self.extra.keys() & _VLLM_ARGUMENTS):
            raise ValueError(f"extra: {', '.join(taken)} follow from other settings, and cannot be given here")
        if sampling := sorted(self.extra.keys() & {"generation_config", "override_generation_config"}):
            raise ValueError(f"extra: {sampling[0]} is refused: only rollout.sampling counts. Set top_p or top_k there")
        return self

    def problems(self, gpus: float, room: int) -> Iterator[str]:
        """Its limit of tokens, and its GPUs."""
        if self.max_model_len is not None and self.max_model_len < room:
            yield f"rollout.engine.extra: max_model_len ({self.max_model_len}) is below environment.episode.max_tokens ({room})"
        wanted = self.placed(gpus, room).tensor_parallel * self.pipeline_parallel
        if gpus and gpus != wanted and max(gpus, wanted) > 1:
            yield (
                f"rollout.engine.extra: tensor_parallel_size x pipeline_parallel_size is {wanted} and rollout.placement.num_gpus "
                f"is {gpus:g}: one engine runs on as many GPUs as its actor has"
            )

    def placed(self, gpus: float, tokens: int | None) -> VllmEngineSettings:
        """Left to itself, vLLM takes the model's limit: with a lower one turns would be cut, and episodes excluded that should end
        as over_length; a much higher one it refuses."""
        made = self.model_copy()
        made._gpus, made._tokens = gpus, tokens
        return made


_VLLM_ARGUMENTS = {
    "model", "dtype", "max_num_seqs", "logprobs_mode", "max_logprobs", "worker_extension_cls", "mm_processor_kwargs",
    "trust_remote_code",
}  # fmt: skip
"""What rayloop itself passes to vLLM."""
_NUMBERS: dict[str, type | tuple[type, ...]] = {
    "tensor_parallel_size": int, "pipeline_parallel_size": int, "max_model_len": int, "kv_cache_memory_bytes": int,
    "gpu_memory_utilization": (int, float),
}  # fmt: skip
"""Arguments of vLLM that rayloop reads too, and their types."""


class SglangEngineSettings(EngineChoice):
    """Generation with SGLang on GPUs, from an environment of its own (constraints-sglang.txt). Never exercised
    (docs/engines.md)."""

    implementation = "rayloop.engines.generation.sglang:SglangEngine"
    starts_slowly = True
    kind: Literal["sglang"] = "sglang"
    extra: dict[str, Any] = {}
    """Further arguments of ``sglang.Engine`` (``tp_size``, ``mem_fraction_static``, ``context_length``, ...): its own defaults
    where they suit. Leave 2 GiB of the GPU beside ``mem_fraction_static``: synced weights pass through them."""

    def problems(self, gpus: float, room: int) -> Iterator[str]:
        """Its GPUs, which lie in one node: synced tensors are opened there from the memory of the first."""
        wanted = self.extra.get("tp_size", 1) * self.extra.get("pp_size", 1)
        if self.extra.get("nnodes", 1) > 1:
            yield "rollout.engine.extra: nnodes above 1 cannot be: synced weights do not leave the node. Lower tp_size"
        if gpus and gpus != wanted and max(gpus, wanted) > 1:
            yield (
                f"rollout.engine.extra: tp_size x pp_size is {wanted} and rollout.placement.num_gpus is {gpus:g}: one engine "
                "runs on as many GPUs as its actor has"
            )


Url = Annotated[str, Field(pattern=r"^https?://")]


class OpenAiHttpEngineSettings(EngineChoice):
    """A server with the OpenAI interface. For evaluation; for training only with ``interface: tokens`` and ``update``."""

    implementation = "rayloop.engines.generation.openai_http:OpenAiHttpEngine"
    holds_model = False
    kind: Literal["openai_http"] = "openai_http"
    base_url: Url | Annotated[tuple[Url, ...], Field(min_length=1)]
    """With the version, for example http://host:8000/v1, reachable from the nodes of the rollout actors. Of several servers of one
    model a group of episodes keeps to one; where that refuses connections, the next is asked."""
    model: str
    """The model's name at the server, as in its /v1/models."""
    api_key_env: str | None = None
    """Environment variable that holds the key, on the nodes of the rollout actors. None: the server wants no key."""
    dtype: Dtype = "bfloat16"
    """What the server computes in: decides how far its log-probs may be from the trainer's (``weight_sync.logprob_check``)."""
    interface: Literal["chat", "tokens"] = "chat"
    """chat: messages and images go out, text comes back, there are no log-probs; ``model.path`` must have a ChatML template
    (Qwen's). tokens: token ids go out, token ids and log-probs come back, as with vLLM's server, which needs ``--logprobs-mode
    processed_logprobs``; text only."""
    update: dict[str, dict[str, Any]] = {}
    """POST requests, in order, that make the server load a model folder and forget its caches: the path from the server's root
    (its own documentation has it), and what is sent as JSON, for example ``{/update_weights_from_disk: {model_path:
    "{folder}"}}``, where ``{folder}`` stands for the folder with the new weights. The server must see the run folder. Empty: it
    keeps its own weights."""

    @property
    def own_weights(self) -> str:
        """Without ``update`` the server keeps its weights."""
        return "" if self.update else f"{self.model} at {', '.join(self.addresses)}"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of every server, without a slash at the end."""
        return tuple(url.rstrip("/") for url in ((self.base_url,) if isinstance(self.base_url, str) else self.base_url))

    def untrainable(self) -> str:
        """Log-probs or updates that are missing."""
        if self.interface == "chat":
            return (
                "rollout.engine.interface: chat brings back neither token ids nor log-probs, which training needs. Use interface: "
                "tokens with a server that returns them, another engine, or `python -m rayloop eval`"
            )
        if self.own_weights:
            return (
                "rollout.engine.update is empty: the server would keep its weights, and every sample after the first step would be "
                "of another policy than the one that is trained. Name the calls that make it load a folder, or use another engine"
            )
        return ""


class OwnEngine(EngineChoice):
    """An engine that is named by where it is: what others ask of it. It is taken to compute in the trainer's ``dtype``."""

    returns_kept = True
    component: Component

    @property
    def label(self) -> str:
        """Where it is."""
        return self.component.use


GenerationSettings = Annotated[
    Annotated[TransformersEngineSettings, Tag("transformers")]
    | Annotated[VllmEngineSettings, Tag("vllm")]
    | Annotated[SglangEngineSettings, Tag("sglang")]
    | Annotated[OpenAiHttpEngineSettings, Tag("openai_http")]
    | Annotated[Component, Tag(OWN)],
    by_kind("transformers"),
]
"""An engine of your own is named by where it is: ``{use: package.module:Class, with: {...}}``."""


class OptimizerSettings(SettingsModel):
    """Learning rate, its schedule and AdamW. A step has ``update.epochs`` * ``update.mini_batches`` optimizer updates."""

    kind: ClassVar[Literal["adamw", "sgd"]] = "adamw"
    """sgd keeps no state: for comparing gradients, in a class derived from this one."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate. The default suits full training of models with billions of parameters; small models and LoRA need more
    (docs/choosing_settings.md)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay of the gradient's mean and of its square. A second one of 0.95 forgets faster: for short runs."""
    eps: ClassVar[float] = 1e-8
    """AdamW's term against a division by 0, PyTorch's default."""
    weight_decay: float = Field(0.0, ge=0)
    """Pulls weights to 0; with LoRA, the adapter. Seldom needed in short runs."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of the run over which the learning rate grows linearly to lr, with each of their updates. Some, when the first updates
    are large."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warm-up. linear and cosine fall to 0 over the run (linear: the default of transformers and TRL); wsd (warm-up,
    stable, decay): constant, then linear to 0 over the last 0.3. Keep constant while you do not know how long a run will be."""
    grad_clip: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm. Lower it when single steps (``actor/grad_norm``) throw the policy off."""

    _updates: int | None = PrivateAttr(None)

    @property
    def total_updates(self) -> int | None:
        """Length of the schedule in optimizer updates, warm-up included; None: the schedule stays constant."""
        return self._updates

    def over(self, steps: int, updates: int = 1) -> OptimizerSettings:
        """The same with a schedule that ends after ``steps`` steps of ``updates`` each; its ``warmup_steps`` are updates."""
        made = self.model_copy(update={"warmup_steps": self.warmup_steps * updates})
        made._updates = steps * updates
        return made


class LoraSettings(SettingsModel):
    """Train low-rank adapters instead of the model (peft)."""

    rank: int = Field(8, gt=0)
    """Size of the adapters. More can express more, and costs memory (docs/choosing_settings.md)."""
    alpha: float = Field(16.0, gt=0)
    """The adapters' output is scaled by alpha / rank: scale both together, or the effective learning rate changes."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the adapters' inputs that an update leaves out, to repeat a published run; log-probs are computed without. The
    updated policy is then not quite the sampled one, which the log-prob mismatch of the loss shows; ``alarms.logprobs`` compares
    fresh episodes instead."""
    targets: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter: all of a layer, as all models that can be trained here name them."""


MICRO_BATCH = 16_384
"""Tokens of a micro-batch where the settings name none."""
LOGPROB_CHUNK = 2048
"""With 152,000 tokens their logits take 6 to 10 GB at the peak (docs/gpu.md); more positions were no faster on a CPU."""
COLLECTIVE_TIMEOUT = 1800.0
"""Seconds after which a collective fails instead of hanging: torch's own limit for gloo, enough for ranks that load a large model
from a slow disk. A rank that dies is noticed at once by Ray, and ``policy.step_timeout`` bounds everything else."""


class FsdpSettings(ComputesOnCpu):
    """Training with PyTorch FSDP2: gloo on CPU, NCCL on GPU, the same code."""

    micro_batch_tokens: int | None = Field(None, gt=0)
    """Tokens per forward and backward, of trajectories packed into one row without padding. None: 16,384; on a CPU a lower power of
    two, down to 1,024, when their activations would take more than a quarter of the memory of the machine where the run is started.
    Lower it when memory runs out; a longer trajectory is alone in one, so 1 packs nothing, to compare with."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass: less memory, more time. None: on a GPU, whose memory is what runs out first
    (7B at 16,384 tokens keeps some 100 GB otherwise). Set false there for small models, true on a CPU that runs out."""
    cpu_offload: bool = False
    """Keep weights and optimizer states in CPU memory: when they do not fit the GPUs; slow."""
    train_vision: bool | None = None
    """Train the vision tower too; with LoRA: adapt its layers. None: in full training, not with LoRA. false leaves it as it is:
    less memory, and it cannot forget; true when the images are unlike what the model knows."""
    lora: LoraSettings | None = None

    @property
    def trains_vision(self) -> bool:
        """Whether the vision tower is trained, or adapted."""
        return self.lora is None if self.train_vision is None else self.train_vision

    @property
    def drops_out(self) -> bool:
        """Whether an update computes with dropout."""
        return self.lora is not None and self.lora.dropout > 0

    @property
    def logprob_chunk(self) -> int:
        """Positions whose logits exist at the same time: a tensor [T, vocabulary] is never held. Less for tiny micro-batches."""
        return min(LOGPROB_CHUNK, 4 * self.micro_batch)

    @property
    def micro_batch(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_tokens or MICRO_BATCH

    def recomputes(self, on_gpu: bool) -> bool:
        """Whether activations are computed again in the backward pass."""
        return on_gpu if self.gradient_checkpointing is None else self.gradient_checkpointing


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """What an engine gets besides settings: its place on the machine."""

    weights: str = ""
    """A folder in the run folder, which all nodes see, for weights that a server loads."""
    scratch: Callable[[], str] = tempfile.mkdtemp
    """Makes a folder for sockets and temporary files; the creator of this object removes it."""
    name: str | None = None
    """Name of the Ray actor, if the engine is in one: vLLM's own metrics then go to Ray's metrics."""


def build_engine(model: ModelSettings, settings: EngineChoice, place: EnginePlace) -> GenerationEngine:
    """Returns the engine of ``settings`` for the model. Raises ConfigError when its library or the model's files are missing."""
    model = model.here(weights=settings.holds_model)
    make: Callable[..., Any]
    if isinstance(settings, OwnEngine):
        make, own = settings.component.resolve(), settings.component.options()
    else:
        make, own = pkgutil.resolve_name(settings.implementation), settings
    engine: GenerationEngine = make(model, own, place)
    return engine
