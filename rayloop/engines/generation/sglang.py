"""Generation with SGLang 0.5.23, in processes that ``sglang.Engine`` starts.

Never exercised on GPUs (docs/engines.md). Only coroutines of its tokenizer manager are called: the
engine's own methods wait on an event loop that already runs here.
"""

import asyncio
import io
import os
import pickle
import tempfile
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from rayloop.core.failures import (
    BroadcastFailed,
    ConfigError,
    DataFailure,
    WeightSyncError,
    WorkerLost,
)
from rayloop.core.model_families import family
from rayloop.core.model_files import Resolved
from rayloop.core.protocols import EngineHealth, Level, Manifest
from rayloop.core.types import Completion, FinishReason, PromptImage, Sampling, TokenPrompt, Version
from rayloop.engines.generation.pending_requests import PendingRequests
from rayloop.engines.generation.sglang_worker import FORGET, LOADER
from rayloop.engines.models import collapsed, has_vision, picture
from rayloop.engines.settings import EnginePlace, ModelSettings, SglangEngineSettings
from rayloop.transports.collective import buckets
from rayloop.transports.manifest import verify

TESTED = "0.5.23"
"""Release of SGLang. The tests compare the arguments of this module with its Python files."""
BUCKET_BYTES = 2**30
"""Size of the parts in which SGLang's processes get the weights; a part is in GPU memory twice."""


class SglangEngine:
    """A ``GenerationEngine``: running turns are prefilled again under new weights.

    Raises ConfigError for another release.
    """

    def __init__(
        self, model: ModelSettings, settings: SglangEngineSettings, place: EnginePlace
    ) -> None:
        # SGLang's image processor would turn the ids into
        # text and back, which can give other tokens.
        os.environ.setdefault("SGLANG_MM_AVOID_RETOKENIZE", "1")
        import sglang

        if sglang.__version__ != TESTED:
            raise ConfigError(
                f"sglang {sglang.__version__} is installed, {TESTED} is wanted"
                " (constraints-sglang.txt)"
            )
        self._settings = settings
        self._running = 0
        self._version: Version | None = None
        self._open = asyncio.Event()
        self._open.set()
        config = AutoConfig.from_pretrained(model.path)
        self._image = config.to_dict().get("image_token_id")
        if has_vision(config) and family(config.model_type).images != "patches":
            raise ConfigError(
                f"engine kind sglang: images of {config.model_type!r} models were never compared"
                " there. Use vllm"
            )
        self._patch: int = config.vision_config.patch_size if has_vision(config) else 0
        self._names = names(Path(model.path), tied=config.get_text_config().tie_word_embeddings)
        self._manager = sglang.Engine(**arguments(model, settings)).tokenizer_manager
        self._pending_requests = PendingRequests()
        # This is the last step before SGLang's scheduler has the request.
        self._manager._send_one_request = self._pending_requests.tracked(
            self._manager._send_one_request, lambda request: request.rid
        )

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn; its version is that of its first token.

        Raises WorkerLost, DataFailure.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        images = [await asyncio.to_thread(sent, image, self._patch) for image in prompt.images]
        # It may have been closed again before this call runs.
        while not self._open.is_set():
            await self._open.wait()
        version = self._version
        if version is None:
            raise WorkerLost(
                "the engine has no weights: the last load failed, or none has succeeded yet"
            )
        request = GenerateReqInput(
            rid=uuid.uuid4().hex,
            input_ids=collapsed(prompt, self._image),
            image_data=images or None,
            sampling_params=parameters(prompt, sampling),
            return_logprob=True,
            return_prompt_token_ids=True,
        )
        try:
            self._running += 1
            with self._pending_requests.request(request.rid):
                answer = await anext(self._manager.generate_request(request, None))
        except asyncio.CancelledError:
            # SGLang continues a request that no caller awaits, until it is aborted.
            self._manager.abort_request(request.rid)
            raise
        except ValueError as error:
            raise DataFailure("prompt", f"SGLang refuses it: {error}") from error
        finally:
            self._running -= 1
        return completion(answer, version, prompt)

    async def leave(self, cohort: str) -> None:
        """Does nothing: SGLang batches."""

    async def pause(self) -> None:
        """Take running requests off the GPU; they are prefilled again after ``resume``.

        Requests that SGLang is still preparing enter first: they carry the version of the present
        weights.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._open.clear()
        try:
            await self._pending_requests.all_scheduled()
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        except BaseException:
            # Waiting requests then fail, instead of waiting for a resume that never comes.
            self._open.set()
            raise

    async def resume(self) -> None:
        """Continue the requests."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._open.set()

    async def sleep(self, level: Level) -> None:
        """Drop its cache, and move its weights to main memory."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(), None)

    async def wake_up(self) -> None:
        """Bring weights and cache back to their places."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)

    async def load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Verify, load whole tensors [name] bucket by bucket through GPU memory, empty the caches.

        Raises WeightSyncError. SGLang does not report missing tensors.
        """
        self._version = None
        await asyncio.to_thread(verify, manifest, tensors)
        # It comes before the first bucket, while the old weights are still whole.
        self._complete(manifest.version, tensors)
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        async with self._changing(manifest.version):
            processes = self._settings.extra.get("tp_size", 1)
            device = torch.device(self._settings.extra.get("device", "cuda"))
            parts_of_weights = buckets(tensors.items(), BUCKET_BYTES, device)
            bucket = await asyncio.to_thread(next, parts_of_weights, None)
            while bucket is not None:
                on_gpu = list(bucket[1].items())
                # torch counts one reader for each serialised handle
                # of GPU memory, so each process gets its own.
                parts = [MultiprocessingSerializer.serialize(on_gpu) for _ in range(processes)]
                request = UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=parts, flush_cache=False
                )
                _check(manifest.version, await self._manager.update_weights_from_tensor(request))
                # A bucket's memory is kept until the next one replaces it.
                bucket = await asyncio.to_thread(next, parts_of_weights, None)
            # A custom loader runs only as part of an update of tensors, so an empty one goes along.
            nothing = pickle.dumps([("", torch.zeros(0, dtype=torch.uint8))])
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[nothing] * processes,
                load_format=FORGET,
                flush_cache=False,
            )
            _check(manifest.version, await self._manager.update_weights_from_tensor(request))

    async def receive(self, version: Version, broadcast: bytes) -> None:
        """Let SGLang's processes receive a broadcast (``StreamingEngine``).

        Its own ``update_weights_from_distributed`` neither verifies the weights nor has a deadline.
        Raises WeightSyncError, BroadcastFailed.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        self._version = None
        with tempfile.TemporaryDirectory() as folder:
            message = bytearray(pickle.dumps((version, broadcast, folder)))
            packed = torch.frombuffer(message, dtype=torch.uint8)
            parts = [pickle.dumps([("", packed)])] * self._settings.receivers
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=parts,
                load_format=LOADER,
                flush_cache=False,
                selector="target",
            )
            async with self._changing(version):
                _check(version, await self._manager.update_weights_from_tensor(request))
                results = [pickle.loads(file.read_bytes()) for file in Path(folder).iterdir()]
                faults = [result for result in results if isinstance(result, Exception)]
                if faults:
                    # A process whose weights are damaged says more than
                    # the others, which only saw the broadcast end.
                    raise min(faults, key=lambda fault: isinstance(fault, BroadcastFailed))
                count = f"{len(results)} of {len(parts)} processes did"
                _check(version, (len(results) == len(parts), count))
                for names in results:
                    self._complete(version, names)

    def _complete(self, version: Version, names: Collection[str]) -> None:
        missing = sorted(self._names.difference(names))
        if missing:
            few = ", ".join(missing[:3])
            raise WeightSyncError(
                f"version {version} lacks {len(missing)} tensors of the engine's model: {few}"
            )

    @asynccontextmanager
    async def _changing(self, version: Version) -> AsyncIterator[None]:
        """Let SGLang take weights inside the block.

        The update is ended in any case: otherwise SGLang refuses to begin the next one.
        """
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        _check(version, await self._manager.begin_weight_update(BeginWeightUpdateReqInput()))
        try:
            yield
        finally:
            ended = await self._manager.end_weight_update(EndWeightUpdateReqInput())
        _check(version, ended)
        flushed = await self._manager.flush_cache()
        _check(version, (flushed.success, "its caches could not be emptied"))
        self._version = version

    def health(self) -> EngineHealth:
        """Return the version and the number of running requests."""
        return EngineHealth(self._version, self._running, 0)


def names(folder: Path, tied: bool) -> frozenset[str]:
    """Return the tensors of a model folder that every weight sync must have.

    A ``tied`` head and computed buffers are left out.
    """

    def is_synced(name: str) -> bool:
        return not name.endswith("inv_freq") and not (tied and name.startswith("lm_head."))

    return frozenset(filter(is_synced, Resolved(folder).stored()))


def sent(image: PromptImage, patch: int) -> bytes:
    """Return the image as a PNG in the size that the model sees.

    SGLang decodes JPEGs on the GPU, and resizes others in its own way, which changes log-probs.
    """
    file = io.BytesIO()
    picture(image, patch).save(file, "PNG", compress_level=1)
    return file.getvalue()


def arguments(model: ModelSettings, settings: SglangEngineSettings) -> dict[str, Any]:
    """Return the keyword arguments of ``sglang.Engine``; ``extra`` overrides the others."""
    pixels = {"min_pixels": model.min_pixels, "max_pixels": model.max_pixels}
    defaults: dict[str, Any] = {
        "model_path": model.path,
        "dtype": settings.dtype,
        "mm_process_config": {"image": pixels},
        "custom_weight_loader": [LOADER, FORGET],
    }
    if settings.sleep:
        defaults["enable_weights_cpu_backup"] = True
    # By default sampling would follow generation_config.json.
    defaults["sampling_defaults"] = "openai"
    return {**defaults, **settings.extra}


def parameters(prompt: TokenPrompt, sampling: Sampling) -> dict[str, Any]:
    """Return SGLang's sampling parameters.

    Its log-probs are computed from the masked logits divided by the temperature. Not
    ``ignore_eos``, as for vLLM: SGLang then ignores ``stop_token_ids``, too.
    """
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": min(sampling.min_tokens, sampling.max_tokens),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.end_tokens),
        "sampling_seed": prompt.seed,
        "logit_bias": {str(token): -1e9 for token in sampling.banned_tokens},
        "skip_special_tokens": False,
    }


def completion(answer: Mapping[str, Any], version: Version, prompt: TokenPrompt) -> Completion:
    """Return the turn from SGLang's answer to the prompt.

    Raises WorkerLost when the turn was aborted, DataFailure when SGLang has tokenized the prompt
    again, as its processor of images does when it cannot keep the ids.
    """
    meta = answer["meta_info"]
    prompt_tokens = tuple(map(int, answer["prompt_token_ids"]))
    # Log-probs of other tokens would be trained without a sign.
    if prompt_tokens != prompt.token_ids:
        raise DataFailure(
            "prompt",
            f"SGLang read other tokens ({len(prompt_tokens)}) than the"
            f" {len(prompt.token_ids)} that were sent",
        )
    finish = meta["finish_reason"]
    if finish["type"] not in ("stop", "length"):
        raise WorkerLost(f"SGLang ended a turn with {finish}")
    reason = FinishReason.LENGTH if finish["type"] == "length" else FinishReason.END_TOKEN
    if isinstance(finish.get("matched"), str):
        reason = FinishReason.STOP_STRING
    logprobs, token_ids, _ = zip(*meta["output_token_logprobs"], strict=True)
    return Completion(token_ids, logprobs, reason, version)


def _check(version: Version, answer: tuple[bool, str]) -> None:
    if not answer[0]:
        raise WeightSyncError(f"version {version}: SGLang did not take the weights: {answer[1]}")
