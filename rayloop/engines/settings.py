"""Settings of the generation engines.

The module imports no torch, so that any process can read a configuration.
"""

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
from rayloop.config.settings import CUSTOM, Component, by_kind
from rayloop.core.protocols import GenerationEngine, Level
from rayloop.core.types import Sampling
from rayloop.engines.training_settings import MICRO_BATCH_TOKENS as MICRO_BATCH_TOKENS
from rayloop.engines.training_settings import FsdpSettings as FsdpSettings
from rayloop.engines.training_settings import LoraSettings as LoraSettings
from rayloop.engines.training_settings import OptimizerSettings as OptimizerSettings

PICTURES_GIB = 1
"""GiB of main memory for vLLM's cache of processed pictures.

vLLM's own 4 are emptied at each sync of weights.
"""


class EngineChoice(Computes):
    """Base of the settings of every generation engine.

    It has the properties that other parts of the system ask for.
    """

    implementation: ClassVar[str]
    """``module:Class``, imported where it is needed (``rayloop.engines.settings``)."""
    cohorts: ClassVar[bool] = False
    """Whether it decodes a group as a separate batch, as ``rollout.deterministic`` asks for."""
    starts_slowly: ClassVar[bool] = False
    """Whether it has separate processes and starts in minutes: ``try`` then takes transformers."""
    returns_token_mask: ClassVar[bool] = False
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
    def sleep(self) -> Level | None:
        """How deep it sleeps while the policy trains; None: both keep their memory."""
        return None

    @property
    def receivers(self) -> int:
        """Processes of it that receive a broadcast of weights.

        0: they come through its rollout actor.
        """
        return 0

    @property
    def own_weights(self) -> str:
        """Which weights answer, for an engine whose weights never change.

        Empty for one that loads new weights.
        """
        return ""

    def untrainable(self) -> str:
        """Return why its answers cannot be trained on, or nothing."""
        return ""

    def problems(self, gpus: float, room: int) -> Iterator[str]:
        """Yield the problems of an actor with ``gpus`` and episodes of up to ``room`` tokens."""
        yield from ()

    def unshared(self, *gpus: float, synchronous: bool) -> Iterator[str]:
        """Yield why it cannot ``sleep``, with these ``num_gpus`` of both roles.

        ``synchronous``: no group is played while some train.
        """
        if self.sleep and not synchronous:
            yield (
                "rollout.engine: one that sleeps while the policy trains plays nothing ahead; set"
                " staleness.max_staleness to 0"
            )
        if self.sleep and max(gpus) >= 1:
            yield (
                "rollout.engine: to share a GPU in turns, set num_gpus of both placements to"
                " fractions that make 1 together"
            )

    def mask_problems(self, sampling: Sampling, where: str) -> Iterator[str]:
        """Yield the problems with ``top_p`` or ``top_k`` of the run, or of ``where``."""
        if sampling.effective_top_k is not None and not self.returns_token_mask:
            key = "top_p" if sampling.top_p < 1 else "top_k"
            yield (
                f"rollout.sampling.{key} is {getattr(sampling, key)}{where}: engine.kind:"
                f" {self.label} does not return the tokens that were kept, over which log-probs are"
                " computed. Use transformers or vllm, or leave top_p and top_k out"
            )

    def placed(self, gpus: float, tokens: int) -> EngineChoice:
        """Return these settings for an actor with ``gpus`` and room for episodes of ``tokens``.

        Keys that are set keep their values.
        """
        return self

    def beside(self, trainer: FsdpSettings) -> EngineChoice:
        """Return these settings in a run with this trainer."""
        return self

    @property
    def adapters(self) -> LoraSettings | None:
        """Adapters that the engine gets alone at a weight sync.

        None: it gets whole weights, into which they are merged.
        """
        return None


class TransformersEngineSettings(EngineChoice, ComputesOnCpu):
    """Generation with Hugging Face transformers: runs everywhere, for small models and CPU."""

    implementation = "rayloop.engines.generation.transformers:TransformersEngine"
    cohorts = returns_token_mask = True
    kind: Literal["transformers"] = "transformers"
    dtype: Dtype = "float32"
    """As ``policy.engine.dtype``: rounding separates their log-probs."""
    max_sequences: int = Field(64, ge=1)
    """Sequences decoded together.

    Lower it when memory runs out; raise it towards a step's trajectories for speed.
    """


DEFAULT_MEMORY_SHARE = 0.9
"""Share of a GPU for vLLM's weights and cache."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as ``max_lora_rank``."""
SHARE_WITH_FIXED_CACHE = 0.01
"""Share of a GPU with ``kv_cache_memory_bytes``, which sets the cache's size.

vLLM only checks at its start that this share is free.
"""


class VllmEngineSettings(EngineChoice):
    """Generation with vLLM, in separate processes below the rollout actor.

    It runs on GPUs, and on CPU for tests.
    """

    implementation = "rayloop.engines.generation.vllm:VllmEngine"
    starts_slowly = returns_token_mask = True
    kind: Literal["vllm"] = "vllm"
    max_sequences: int = Field(256, ge=1)
    """Sequences decoded together.

    Lower it when memory runs out; above a step's trajectories per engine it does nothing.
    """
    extra: dict[str, Any] = {}
    """Further arguments of vLLM's ``AsyncEngineArgs``, by their names there.

    ``gpu_memory_utilization``: share of the GPU's memory (on CPU: of the machine's) that must be
    free at the start, 0.9 by default; lower it when something else needs that memory. Leave 3.5 GB
    of the GPU free: synced weights pass through them. ``kv_cache_memory_bytes``: size of the cache
    per GPU, which then decides alone; set it on CPU and on a shared GPU. ``tensor_parallel_size``:
    by default the actor's ``num_gpus``. ``max_model_len``: by default
    ``environment.episode.max_tokens``. ``enforce_eager: true``: no compilation and no CUDA graphs;
    it starts in seconds, and decodes more slowly. ``enable_sleep_mode: true``: it has the GPU in
    turns with the policy, each in main memory while the other computes. ``return_sampling_mask:
    true`` (vLLM's Model Runner V2): less work for ``top_p`` and ``top_k``; greedy log-probs are 0.
    """

    _gpus: float = PrivateAttr(0.0)
    _tokens: int | None = PrivateAttr(None)
    _adapters: LoraSettings | None = PrivateAttr(None)

    @property
    def sleep(self) -> Level | None:
        """Without weights: each step's sync brings all."""
        return "level2" if self.extra.get("enable_sleep_mode") else None

    @property
    def tensor_parallel(self) -> int:
        """GPUs of a stage of the pipeline: the actor's GPUs, divided by the number of stages."""
        gpus_per_stage = max(1, self._gpus // self.pipeline_parallel)
        return int(self.extra.get("tensor_parallel_size") or gpus_per_stage)

    @property
    def pipeline_parallel(self) -> int:
        """Stages of the pipeline."""
        return int(self.extra.get("pipeline_parallel_size", 1))

    @property
    def receivers(self) -> int:
        """One per GPU."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a prompt and its turn together; None: the model's own limit."""
        return self.extra.get("max_model_len", self._tokens)

    @property
    def memory_fraction(self) -> float:
        """Share of the GPU's memory that vLLM wants free at its start."""
        default = SHARE_WITH_FIXED_CACHE if self.kv_cache_bytes else DEFAULT_MEMORY_SHARE
        return float(self.extra.get("gpu_memory_utilization", default))

    @property
    def kv_cache_bytes(self) -> int | None:
        """Size of the cache of keys and values per GPU; None: the rest of the memory."""
        return self.extra.get("kv_cache_memory_bytes")

    @model_validator(mode="after")
    def _own_arguments(self) -> VllmEngineSettings:
        for name, kind in _NUMBERS.items():
            if name not in self.extra:
                continue
            number = self.extra[name]
            has_kind = isinstance(number, kind)
            if not has_kind or number <= 0:
                raise ValueError(f"extra: {name} is {number!r}, expected a number above 0")
        duplicates = sorted(self.extra.keys() & _VLLM_ARGUMENTS)
        if duplicates:
            raise ValueError(
                f"extra: {', '.join(duplicates)} follow from other settings, and cannot be given"
                " here"
            )
        sampling = sorted(self.extra.keys() & _SAMPLING_ARGUMENTS)
        if sampling:
            raise ValueError(
                f"extra: {sampling[0]} is refused: only rollout.sampling counts. Set top_p or top_k"
                " there"
            )
        return self

    def problems(self, gpus: float, room: int) -> Iterator[str]:
        """Yield the problems of its limit of tokens, and of its GPUs."""
        if self.max_model_len is not None and self.max_model_len < room:
            yield (
                f"rollout.engine.extra: max_model_len ({self.max_model_len}) is below"
                f" environment.episode.max_tokens ({room})"
            )
        wanted = self.placed(gpus, room).receivers
        if gpus and gpus != wanted and max(gpus, wanted) > 1:
            yield (
                f"rollout.engine.extra: tensor_parallel_size x pipeline_parallel_size is {wanted}"
                f" and rollout.placement.num_gpus is {gpus:g}: one engine runs on as many GPUs as"
                " its actor has"
            )

    def placed(self, gpus: float, tokens: int | None) -> VllmEngineSettings:
        """Return these settings for an actor, with its ``gpus`` and its limit of ``tokens``.

        By default vLLM takes the model's limit: with a lower one turns would be cut, and episodes
        excluded that should end as over_length; a much higher one it refuses.
        """
        copy = self.model_copy()
        copy._gpus = gpus
        copy._tokens = tokens
        return copy

    def beside(self, trainer: FsdpSettings) -> VllmEngineSettings:
        """Return these settings in a run with this trainer.

        Adapters of the language model go to vLLM alone, unless ``extra`` has ``enable_lora: false``
        or a quantised model.
        """
        copy = self.model_copy()
        lora = None if trainer.trains_vision else trainer.lora
        fits = lora is not None and lora.rank <= VLLM_RANKS[-1] and "quantization" not in self.extra
        copy._adapters = lora if fits and self.extra.get("enable_lora", True) else None
        return copy

    @property
    def adapters(self) -> LoraSettings | None:
        """The adapters that ``beside`` found."""
        return self._adapters


_VLLM_ARGUMENTS = {
    "model",
    "dtype",
    "max_num_seqs",
    "logprobs_mode",
    "max_logprobs",
    "worker_extension_cls",
    "mm_processor_kwargs",
    "trust_remote_code",
}
"""Arguments that rayloop itself passes to vLLM."""
_SAMPLING_ARGUMENTS = {"generation_config", "override_generation_config"}
"""Arguments of vLLM that would change sampling."""
_NUMBERS: dict[str, type | tuple[type, ...]] = {
    "tensor_parallel_size": int,
    "pipeline_parallel_size": int,
    "max_model_len": int,
    "kv_cache_memory_bytes": int,
    "gpu_memory_utilization": (int, float),
}
"""Arguments of vLLM that rayloop reads too, and their types."""


class SglangEngineSettings(EngineChoice):
    """Generation with SGLang on GPUs, from a separate environment (constraints-sglang.txt).

    Never exercised there (docs/engines.md).
    """

    implementation = "rayloop.engines.generation.sglang:SglangEngine"
    starts_slowly = True
    kind: Literal["sglang"] = "sglang"
    extra: dict[str, Any] = {}
    """Further arguments of ``sglang.Engine``, by their names there.

    Examples are ``tp_size``, ``mem_fraction_static`` and ``context_length``. ``enable_memory_saver:
    true``: it has the GPU in turns with the policy. Leave 3 GiB of the GPU in addition to
    ``mem_fraction_static``: synced weights pass through them.
    """

    @property
    def sleep(self) -> Level | None:
        """With its weights in main memory."""
        return "level1" if self.extra.get("enable_memory_saver") else None

    @property
    def receivers(self) -> int:
        """The answer to a weight update does not wait for further stages of a pipeline."""
        return int(self.extra.get("tp_size", 1)) if self.extra.get("pp_size", 1) == 1 else 0

    def problems(self, gpus: float, room: int) -> Iterator[str]:
        """Yield the problems of its GPUs, which must be in one node.

        Synced tensors are opened there from the memory of the first.
        """
        wanted = self.extra.get("tp_size", 1) * self.extra.get("pp_size", 1)
        if self.extra.get("nnodes", 1) > 1:
            yield (
                "rollout.engine.extra: nnodes above 1 cannot be: synced weights do not leave the"
                " node. Lower tp_size"
            )
        if gpus and gpus != wanted and max(gpus, wanted) > 1:
            yield (
                f"rollout.engine.extra: tp_size x pp_size is {wanted} and"
                f" rollout.placement.num_gpus is {gpus:g}: one engine runs on as many GPUs as its"
                " actor has"
            )


Url = Annotated[str, Field(pattern=r"^https?://")]


class OpenAiHttpEngineSettings(EngineChoice):
    """A server with the OpenAI interface.

    For evaluation; for training only with ``interface: tokens`` and ``update``.
    """

    implementation = "rayloop.engines.generation.openai_http:OpenAiHttpEngine"
    holds_model = False
    kind: Literal["openai_http"] = "openai_http"
    base_url: Url | Annotated[tuple[Url, ...], Field(min_length=1)]
    """Address with the version, for example http://host:8000/v1.

    It must be reachable from the nodes of the rollout actors. With several servers of one model, a
    group of episodes keeps to one; where that refuses connections, the next is asked. Why a key:
    only the user knows where the server runs.
    """
    model: str
    """The model's name at the server, which its /v1/models lists.

    A server that needs a key gets the variable ``OPENAI_API_KEY`` of the rollout actors' nodes. Why
    a key: one server holds several, such as a model and its adapters.
    """
    dtype: Dtype = "bfloat16"
    """Type in which the server computes.

    It decides how far its log-probs may be from the trainer's (``weight_sync.logprob_check``).
    """
    interface: Literal["chat", "tokens"] = "chat"
    """Form of requests and answers.

    chat: messages and images go out, text comes back without log-probs; ``model.path`` must have a
    ChatML template (Qwen's). tokens: token ids go out, token ids and log-probs come back, as with
    vLLM's server, which needs ``--logprobs-mode processed_logprobs``; text only. Why a key: a
    hosted model can only be evaluated, with chat; training needs tokens.
    """
    update: dict[str, dict[str, Any]] = {}
    """POST requests, in order, that make the server load a model folder and forget its caches.

    Each has the path from the server's root (its own documentation has it), and the JSON to send,
    for example ``{/update_weights_from_disk: {model_path: "{folder}"}}``, where ``{folder}`` stands
    for the folder with the new weights. The server must see the run folder. Empty: it keeps its own
    weights. Why a key: SGLang, vLLM and others have different calls for it.
    """

    @property
    def own_weights(self) -> str:
        """Without ``update`` the server keeps its weights."""
        return "" if self.update else f"{self.model} at {', '.join(self.addresses)}"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all servers, without a slash at the end."""
        urls = (self.base_url,) if isinstance(self.base_url, str) else self.base_url
        return tuple(url.rstrip("/") for url in urls)

    def untrainable(self) -> str:
        """Return which log-probs or updates are missing, or nothing."""
        if self.interface == "chat":
            return (
                "rollout.engine.interface: chat brings back neither token ids nor log-probs, which"
                " training needs. Use interface: tokens with a server that returns them, another"
                " engine, or `python -m rayloop eval`"
            )
        if self.own_weights:
            return (
                "rollout.engine.update is empty: the server would keep its weights, and every"
                " sample after the first step would be of another policy than the one that is"
                " trained. Name the calls that make it load a folder, or use another engine"
            )
        return ""


class CustomEngine(EngineChoice):
    """Settings of a custom engine, which is named by its module and class.

    It is assumed to compute in the trainer's ``dtype``.
    """

    returns_token_mask = True
    component: Component

    @property
    def sleep(self) -> Level | None:
        """As ``with`` says."""
        return self.component.with_.get("sleep")

    @property
    def label(self) -> str:
        """Where it is."""
        return self.component.use


GenerationSettings = Annotated[
    Annotated[TransformersEngineSettings, Tag("transformers")]
    | Annotated[VllmEngineSettings, Tag("vllm")]
    | Annotated[SglangEngineSettings, Tag("sglang")]
    | Annotated[OpenAiHttpEngineSettings, Tag("openai_http")]
    | Annotated[Component, Tag(CUSTOM)],
    by_kind("transformers"),
]
"""A custom engine is named by its address: ``{use: package.module:Class, with: {...}}``."""


@dataclass(frozen=True)
class EnginePlace:
    """The place of an engine on its machine: folders and names."""

    weights: str = ""
    """A folder in the run folder, which all nodes see, for weights that a server loads."""
    scratch: Callable[[], str] = tempfile.mkdtemp
    """Makes a folder for sockets and temporary files; the creator of this object removes it."""
    name: str | None = None
    """Name of the engine's Ray actor, if any: vLLM's own metrics then go to Ray's metrics."""


def build_engine(
    model: ModelSettings, settings: EngineChoice, place: EnginePlace
) -> GenerationEngine:
    """Return the engine of ``settings`` for the model.

    Raises ConfigError when its library or the model's files are missing.
    """
    model = model.here(weights=settings.holds_model)
    make: Callable[..., Any]
    options: Any = settings
    if isinstance(settings, CustomEngine):
        make = settings.component.resolve()
        options = settings.component.options()
    else:
        make = pkgutil.resolve_name(settings.implementation)
    engine: GenerationEngine = make(model, options, place)
    return engine
