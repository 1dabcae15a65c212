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
from rayloop.engines.generation.entering import Entering
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
        self._settings, self._running, self._open = settings, 0, asyncio.Event()
        self._version: Version | None = None
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
        self._entering = Entering()
        # This is the last step before SGLang's scheduler has the request.
        self._manager._send_one_request = self._entering.noticed(
            self._manager._send_one_request, lambda request: request.rid
        )

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn; its version is that of its first token.

        Raises WorkerLost, DataFailure.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        images = [await asyncio.to_thread(sent, image, self._patch) for image in prompt.images]
        while not self._open.is_set():  # it may have been closed again before this call runs
            await self._open.wait()
        if (version := self._version) is None:
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
            with self._entering.request(request.rid):
                answer = await anext(self._manager.generate_request(request, None))
        except asyncio.CancelledError:
            # SGLang goes on with a request that nobody awaits, until it is aborted.
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

        Those that SGLang is still preparing are let in first: they carry the version of the present
        weights.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._open.clear()
        try:
            await self._entering.all_in()
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        except BaseException:
            # waiting requests then fail, instead of waiting for a resume that never comes
            self._open.set()
            raise

    async def resume(self) -> None:
        """Continue the requests."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._open.set()

    async def sleep(self, level: Level) -> None:
        """Its cache goes, its weights go to main memory."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(), None)

    async def wake(self) -> None:
        """Weights and cache are where they were."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)

    async def load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Verify, load whole tensors [name] bucket by bucket through GPU memory, empty the caches.

        Raises WeightSyncError. SGLang says nothing of tensors that it misses.
        """
        self._version = None
        await asyncio.to_thread(verify, manifest, tensors)
        # It comes before the first bucket, while the old weights are still whole.
        self._complete(manifest.version, tensors)
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        async with self._changing(manifest.version):
            processes = self._settings.extra.get("tp_size", 1)
            made = buckets(
                tensors.items(),
                BUCKET_BYTES,
                torch.device(self._settings.extra.get("device", "cuda")),
            )
            while bucket := await asyncio.to_thread(
                next, made, None
            ):  # kept until the next one replaces it
                on_gpu = list(bucket[1].items())
                # torch counts one reader for each serialised handle
                # of GPU memory, so each process gets its own.
                parts = [MultiprocessingSerializer.serialize(on_gpu) for _ in range(processes)]
                request = UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=parts, flush_cache=False
                )
                _check(manifest.version, await self._manager.update_weights_from_tensor(request))
            # A custom loader runs only as part of an update of tensors, so an empty one goes along.
            nothing = pickle.dumps([("", torch.zeros(0, dtype=torch.uint8))])
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[nothing] * processes,
                load_format=FORGET,
                flush_cache=False,
            )
            _check(manifest.version, await self._manager.update_weights_from_tensor(request))

    async def receive(self, version: Version, broadcast: bytes) -> None:
        """Let SGLang's processes receive a broadcast (``StreamingEngine``): its own
        ``update_weights_from_distributed`` neither verifies what came nor has a deadline. Raises
        WeightSyncError, BroadcastFailed.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        self._version = None
        with tempfile.TemporaryDirectory() as folder:
            packed = torch.frombuffer(
                bytearray(pickle.dumps((version, broadcast, folder))), dtype=torch.uint8
            )
            parts = [pickle.dumps([("", packed)])] * self._settings.receivers
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=parts,
                load_format=LOADER,
                flush_cache=False,
                selector="target",
            )
            async with self._changing(version):
                _check(version, await self._manager.update_weights_from_tensor(request))
                found = [pickle.loads(file.read_bytes()) for file in Path(folder).iterdir()]
                if faults := [fault for fault in found if isinstance(fault, Exception)]:
                    # A process whose weights are damaged says more than
                    # the others, which only saw the broadcast end.
                    raise min(faults, key=lambda fault: isinstance(fault, BroadcastFailed))
                _check(
                    version,
                    (len(found) == len(parts), f"{len(found)} of {len(parts)} processes did"),
                )
                for names in found:
                    self._complete(version, names)

    def _complete(self, version: Version, names: Collection[str]) -> None:
        if missing := sorted(self._names.difference(names)):
            few = ", ".join(missing[:3])
            raise WeightSyncError(
                f"version {version} lacks {len(missing)} tensors of the engine's model: {few}"
            )

    @asynccontextmanager
    async def _changing(self, version: Version) -> AsyncIterator[None]:
        """SGLang takes weights within.

        The end follows in any case: without it, SGLang refuses the next beginning.
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
        """Version and running requests."""
        return EngineHealth(self._version, self._running, 0)


def names(folder: Path, tied: bool) -> frozenset[str]:
    """Returns the tensors of a model folder that every weight sync must have: no ``tied`` head, no
    computed buffers.
    """
    found = Resolved(folder).stored()
    return frozenset(
        n for n in found if not n.endswith("inv_freq") and not (tied and n.startswith("lm_head."))
    )


def sent(image: PromptImage, patch: int) -> bytes:
    """Returns the image as a PNG in the size that the model sees.

    SGLang decodes JPEGs on the GPU, and resizes others in its own way, which changes log-probs.
    """
    file = io.BytesIO()
    picture(image, patch).save(file, "PNG", compress_level=1)
    return file.getvalue()


def arguments(model: ModelSettings, settings: SglangEngineSettings) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine``; those of ``extra`` win."""
    pixels = {"min_pixels": model.min_pixels, "max_pixels": model.max_pixels}
    defaults: dict[str, Any] = {
        "model_path": model.path,
        "dtype": settings.dtype,
        "mm_process_config": {"image": pixels},
        "custom_weight_loader": [LOADER, FORGET],
    }
    if settings.sleep:
        defaults["enable_weights_cpu_backup"] = True
    return {
        **defaults,
        "sampling_defaults": "openai",
        **settings.extra,
    }  # not those of generation_config.json


def parameters(prompt: TokenPrompt, sampling: Sampling) -> dict[str, Any]:
    """SGLang's sampling parameters.

    Its log-probs are those of the masked logits divided by the temperature. Not ``ignore_eos``, as
    for vLLM: SGLang then ignores ``stop_token_ids``, too.
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
    """From SGLang's answer to the prompt.

    Raises WorkerLost when the turn was aborted, DataFailure when SGLang has tokenized the prompt
    anew, as its processor of images does when it cannot keep the ids.
    """
    meta, read = answer["meta_info"], tuple(map(int, answer["prompt_token_ids"]))
    # Log-probs of other tokens would be trained without a sign.
    if read != prompt.token_ids:
        raise DataFailure(
            "prompt",
            f"SGLang read other tokens ({len(read)}) than the {len(prompt.token_ids)} that were"
            " sent",
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
