"""Generation with SGLang 0.5.23, in processes that ``sglang.Engine`` starts. Never exercised (docs/engines.md). Only coroutines of
its tokenizer manager are called: the engine's own methods wait on an event loop that already runs here."""

import asyncio
import io
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from rayloop.core.failures import ConfigError, DataFailure, WeightSyncError, WorkerLost
from rayloop.core.model_families import family
from rayloop.core.protocols import EngineHealth, Manifest
from rayloop.core.types import Completion, FinishReason, PromptImage, Sampling, TokenPrompt, Version
from rayloop.engines.models import collapsed, has_vision, picture
from rayloop.engines.settings import EnginePlace, ModelSettings, SglangEngineSettings
from rayloop.transports.collective import buckets
from rayloop.transports.manifest import verify

TESTED = "0.5.23"
"""Release of SGLang. The tests compare the arguments of this module with its Python files."""
BUCKET_BYTES = 2**30
"""Size of the parts in which SGLang's processes get the weights; a part is in GPU memory twice."""


class SglangEngine:
    """A ``GenerationEngine``: running turns are prefilled again under new weights. Raises ConfigError for another release."""

    def __init__(self, model: ModelSettings, settings: SglangEngineSettings, place: EnginePlace) -> None:
        os.environ.setdefault("SGLANG_MM_AVOID_RETOKENIZE", "1")
        import sglang

        if sglang.__version__ != TESTED:
            raise ConfigError(f"sglang {sglang.__version__} is installed, {TESTED} is wanted (constraints-sglang.txt)")
        self._settings, self._running, self._open = settings, 0, asyncio.Event()
        self._version: Version | None = None
        self._open.set()
        config = AutoConfig.from_pretrained(model.path)
        self._image = config.to_dict().get("image_token_id")
        if has_vision(config) and family(config.model_type).images != "patches":
            raise ConfigError(f"engine kind sglang: images of {config.model_type!r} models were never compared there. Use vllm")
        self._patch: int = config.vision_config.patch_size if has_vision(config) else 0
        self._names = names(Path(model.path), tied=config.get_text_config().tie_word_embeddings)
        self._manager = sglang.Engine(**arguments(model, settings)).tokenizer_manager

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn; its version is that of its first token. Raises WorkerLost, DataFailure."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        images = [await asyncio.to_thread(sent, image, self._patch) for image in prompt.images]
        while not self._open.is_set():  # it may have been closed again before this call runs
            await self._open.wait()
        if (version := self._version) is None:
            raise WorkerLost("the engine has no weights: the last load failed, or none has succeeded yet")
        request = GenerateReqInput(
            rid=uuid.uuid4().hex, input_ids=collapsed(prompt, self._image), image_data=images or None,
            sampling_params=parameters(prompt, sampling), return_logprob=True,
        )  # fmt: skip
        try:
            self._running += 1
            answer = await anext(self._manager.generate_request(request, None))
        except asyncio.CancelledError:
            self._manager.abort_request(request.rid)
            raise
        except ValueError as error:
            raise DataFailure("prompt", f"SGLang refuses it: {error}") from error
        finally:
            self._running -= 1
        return completion(answer["meta_info"], version, len(prompt.token_ids))

    async def leave(self, cohort: str) -> None:
        """Does nothing: SGLang batches."""

    async def pause(self) -> None:
        """Take running requests off the GPU; they are prefilled again after ``resume``."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._open.clear()
        await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))

    async def resume(self) -> None:
        """Continue the requests."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._open.set()

    async def load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Verify, load whole tensors [name] bucket by bucket through GPU memory, empty the caches. Raises WeightSyncError. SGLang
        says nothing of tensors that it misses."""
        self._version = None
        await asyncio.to_thread(verify, manifest, tensors)
        if missing := sorted(self._names - tensors.keys()):
            few = ", ".join(missing[:3])
            raise WeightSyncError(f"version {manifest.version} lacks {len(missing)} tensors of the engine's model: {few}")
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )
        from sglang.srt.utils import MultiprocessingSerializer

        _check(manifest, await self._manager.begin_weight_update(BeginWeightUpdateReqInput()))
        for bucket in buckets(manifest, BUCKET_BYTES):
            on_gpu = await asyncio.to_thread(_on_gpu, tensors, bucket.offsets)  # kept until the next bucket replaces it
            parts = [MultiprocessingSerializer.serialize(on_gpu) for _ in range(self._settings.extra.get("tp_size", 1))]
            request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=parts, flush_cache=False)
            _check(manifest, await self._manager.update_weights_from_tensor(request))
        _check(manifest, await self._manager.end_weight_update(EndWeightUpdateReqInput()))
        flushed = await self._manager.flush_cache()
        _check(manifest, (flushed.success, "its caches could not be emptied"))
        self._version = manifest.version

    def health(self) -> EngineHealth:
        """Version and running requests."""
        return EngineHealth(self._version, self._running, 0)


def _on_gpu(tensors: Mapping[str, Tensor], names: Iterable[str]) -> list[tuple[str, Tensor]]:
    return [(name, tensors[name].cuda()) for name in names]


def names(folder: Path, tied: bool) -> frozenset[str]:
    """Returns the tensors of a model folder that every weight sync must have: no ``tied`` head, no computed buffers."""
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found.update(tensors.keys())
    return frozenset(n for n in found if not n.endswith("inv_freq") and not (tied and n.startswith("lm_head.")))


def sent(image: PromptImage, patch: int) -> bytes:
    """Returns the image as a PNG in the size that the model sees. SGLang decodes JPEGs on the GPU, and resizes others in its own
    way, which changes log-probs."""
    file = io.BytesIO()
    picture(image, patch).save(file, "PNG", compress_level=1)
    return file.getvalue()


def arguments(model: ModelSettings, settings: SglangEngineSettings) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine``; those of ``extra`` win."""
    pixels = {"min_pixels": model.min_pixels, "max_pixels": model.max_pixels}
    defaults = {"model_path": model.path, "dtype": settings.dtype, "mm_process_config": {"image": pixels}}
    return {**defaults, "sampling_defaults": "openai", **settings.extra}  # not those of generation_config.json


def parameters(prompt: TokenPrompt, sampling: Sampling) -> dict[str, Any]:
    """SGLang's sampling parameters. Its log-probs are those of the masked logits divided by the temperature. Not ``ignore_eos``, as
    for vLLM: SGLang then ignores ``stop_token_ids``, too."""
    return {
        "temperature": sampling.temperature, "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": min(sampling.min_tokens, sampling.max_tokens),
        "stop": list(sampling.stop), "stop_token_ids": list(sampling.end_tokens), "sampling_seed": prompt.seed,
        "logit_bias": {str(token): -1e9 for token in sampling.banned_tokens}, "skip_special_tokens": False,
    }  # fmt: skip


def completion(meta: Mapping[str, Any], version: Version, sent: int) -> Completion:
    """From the ``meta_info`` of an answer to ``sent`` prompt tokens. Raises WorkerLost when the turn was aborted, DataFailure when
    SGLang has tokenized the prompt anew, as its processor of images does when it cannot keep the ids."""
    if meta["prompt_tokens"] != sent:
        raise DataFailure("prompt", f"SGLang read {meta['prompt_tokens']} tokens where {sent} were sent")
    finish = meta["finish_reason"]
    if finish["type"] not in ("stop", "length"):
        raise WorkerLost(f"SGLang ended a turn with {finish}")
    reason = FinishReason.LENGTH if finish["type"] == "length" else FinishReason.END_TOKEN
    if isinstance(finish.get("matched"), str):
        reason = FinishReason.STOP_STRING
    logprobs, token_ids, _ = zip(*meta["output_token_logprobs"], strict=True)
    return Completion(token_ids, logprobs, reason, version)


def _check(manifest: Manifest, answer: tuple[bool, str]) -> None:
    if not answer[0]:
        raise WeightSyncError(f"version {manifest.version}: SGLang did not take the weights: {answer[1]}")
