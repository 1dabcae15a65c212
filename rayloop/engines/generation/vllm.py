"""Generation with vLLM, on GPUs and on CPU.

Its ``AsyncLLM`` runs in the rollout actor, its engine and workers in processes below the actor
(vllm_worker.py).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor
from transformers import AutoConfig

from rayloop.core.failures import BroadcastFailed, InfrastructureFailure, OverLongPrompt, WorkerLost
from rayloop.core.model_families import family
from rayloop.core.protocols import EngineHealth, Level, Manifest
from rayloop.core.threads import Cache
from rayloop.core.token_mask import MAX_TOP_K, TokenMask
from rayloop.core.types import (
    Completion,
    FinishReason,
    PromptImage,
    Sampling,
    TokenPrompt,
    Version,
    derive,
)
from rayloop.engines.generation.pending_requests import PendingRequests
from rayloop.engines.generation.vllm_process import (
    VllmLoad,
    alive,
    answered,
    common_arguments,
    output,
    prepare,
    profiler,
    start,
    stat_loggers,
)
from rayloop.engines.generation.vllm_worker import written
from rayloop.engines.models import collapsed, has_vision, image_limits, picture
from rayloop.engines.settings import (
    VLLM_RANKS,
    EnginePlace,
    LoraSettings,
    ModelSettings,
    VllmEngineSettings,
)

RETRY_PAUSES_S = (0.05, 0.5, 2.0)
"""Pauses before each further attempt at a request that vLLM gave up.

That it gave up says nothing about the engine.
"""
TIED_TOKENS = 64
"""Tokens beyond ``top_k`` whose log-probs vLLM returns too.

It keeps all that are as likely as the last one of ``top_k``.
"""


class VllmEngine:
    """A ``GenerationEngine``.

    It serves nothing until the first ``load``: the weights of the folder have no version.
    """

    def __init__(
        self, model: ModelSettings, settings: VllmEngineSettings, place: EnginePlace
    ) -> None:
        """Start vLLM.

        With ``place.name``, which needs a Ray process, vLLM's metrics go to Ray's under this name.
        """
        folder = place.scratch()
        prepare(settings, folder)
        # The engines of a node share one copy of the weights,
        # so the file is above each one's own folder.
        self._meeting = f"{os.path.dirname(folder) if place.name else folder}/weights"
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=False)
        self._settings = settings
        self._vision = has_vision(config)
        self._image_token: int | None = config.image_token_id if self._vision else None
        self._family = family(config.model_type)
        has_patches = self._family.images == "patches"
        self._patch: int = config.vision_config.patch_size if has_patches else 0
        self._load = VllmLoad()
        self._lora = settings.adapters if self._family.adapters else None
        limits = image_limits(model, config) if self._vision else {}
        arguments = _arguments(model, settings, limits, self._lora)
        arguments.setdefault("served_model_name", place.name)
        self._profiles = f"{folder}/profiles"
        # The user's own arguments win, as with all others.
        arguments.setdefault("profiler_config", profiler(self._profiles))
        self._llm = start(arguments, stat_loggers(self._load, place.name))
        self._limit: int = self._llm.model_config.max_model_len
        self._vocabulary: int = config.get_text_config().vocab_size
        self._version: Version | None = None
        self._failed_loads = 0
        self._serial = itertools.count()
        self._running = 0
        self._pending_requests = PendingRequests()
        # vLLM processes images before its scheduler has
        # the request; a pause in between would not see it.
        self._llm.add_request = self._pending_requests.tracked(self._llm.add_request)
        self._images: Cache[str, Image.Image] = Cache(
            256 << 20, lambda image: 3 * image.width * image.height
        )
        self._open = asyncio.Event()
        self._open.set()

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn; its version is that of its beginning.

        A cancelled call ends the request. Raises WorkerLost without loaded weights and when vLLM's
        processes are dead, InfrastructureFailure when vLLM gives the request up again and again,
        OverLongPrompt, DataFailure.
        """
        completion = await self._completed(prompt, sampling)
        for pause in RETRY_PAUSES_S:
            if completion is None:
                await asyncio.sleep(pause)
                completion = await self._completed(prompt, sampling)
        if completion is not None:
            return completion
        raise InfrastructureFailure(
            f"vLLM gave the request up {len(RETRY_PAUSES_S) + 1} times, with finish_reason error"
        )

    async def _completed(self, prompt: TokenPrompt, sampling: Sampling) -> Completion | None:
        """Return the turn; None when vLLM ended the request with an error.

        It had then dropped a cached image, and needs it again.
        """
        tokens = collapsed(prompt, self._image_token, around=bool(self._family.around))
        images: list[Image.Image] = []
        if prompt.images:
            images = await asyncio.to_thread(lambda: list(map(self._image, prompt.images)))
        # It may have been closed again before this call runs.
        while not self._open.is_set():
            await self._open.wait()
        version = self._version
        if version is None:
            raise WorkerLost(
                "the engine has no weights: the last load failed, or none has succeeded yet"
            )
        # vLLM would raise a ValueError with its own words; one token must fit behind the prompt.
        if len(prompt.token_ids) >= self._limit:
            raise OverLongPrompt(len(prompt.token_ids), self._limit - 1)
        masks = bool(self._settings.extra.get("return_sampling_mask"))
        request = self._prompt(prompt, tokens, images)
        parameters = _parameters(prompt, sampling, self._vocabulary, masks)
        # Nothing is awaited between here and the version above: pause() sees the request, or the
        # request sees the pause.
        number = str(next(self._serial))
        failed_loads = self._failed_loads
        self._running += 1
        try:
            with self._pending_requests.request(number):
                sampled = await output(
                    self._llm, request, parameters, number, adapted=self._lora is not None
                )
        finally:
            self._running -= 1
        # Its tokens may come from weights that are half old and half new.
        if self._failed_loads != failed_loads:
            raise WorkerLost("a load failed while the request was running")
        if sampled.finish_reason == "error":
            return None
        return _completion(sampled, sampling, version)

    async def leave(self, cohort: str) -> None:
        """Does nothing: vLLM batches."""

    async def pause(self) -> None:
        """Freeze running requests.

        Their cache is dropped, and all others' as well. Requests that vLLM is still preparing enter
        first: they carry the version of the present weights.
        """
        self._open.clear()
        try:
            await self._pending_requests.all_scheduled()
            await answered(self._llm, self._llm.pause_generation(mode="keep", clear_cache=True))
        except BaseException:
            # Waiting requests then fail, instead of waiting for a resume that never comes.
            self._open.set()
            raise

    async def resume(self) -> None:
        """Continue frozen requests, and start new ones."""
        await answered(self._llm, self._llm.resume_generation())
        self._open.set()

    async def sleep(self, level: Level) -> None:
        """Enter vLLM's sleep mode, for GPUs."""
        # Level 2 drops the weights, so nothing may be served before the next load.
        if level == "level2":
            self._version = None
        await answered(self._llm, self._llm.sleep(level=int(level[-1])))

    async def wake_up(self) -> None:
        """Bring weights and cache back to their places."""
        await answered(self._llm, self._llm.wake_up())

    async def load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Give the tensors to the workers, which verify them.

        Raises WeightSyncError. ``tensors`` [name] are all of the model's, on any device, or only
        the adapters'; they are converted to the engine's dtype.
        """
        async with self._changing(manifest.version):
            # Gigabytes are copied in a thread, since health checks must be answered during it.
            file = await asyncio.to_thread(written, self._meeting, manifest, tensors)
            path = f"/proc/{os.getpid()}/fd/{file}"
            try:
                await self._take("take_weights", path, pickle.dumps(manifest))
            finally:
                os.close(file)

    async def receive(self, version: Version, broadcast: bytes) -> None:
        """Let the workers receive a broadcast (``StreamingEngine``).

        Raises WeightSyncError, BroadcastFailed.
        """
        async with self._changing(version):
            await self._take("take_broadcast", pickle.dumps(version), broadcast)

    @asynccontextmanager
    async def _changing(self, version: Version) -> AsyncIterator[None]:
        # An answer that arrives during the change was sampled before it.
        self._version = None
        try:
            yield
        except BaseException:
            self._failed_loads += 1
            raise
        self._version = version

    async def _take(self, method: str, *arguments: Any) -> None:
        scale = (self._lora.rank, self._lora.alpha) if self._lora else ()
        await answered(self._llm, self._llm.collective_rpc("forget_names"))
        results = await answered(
            self._llm, self._llm.collective_rpc(method, args=(*arguments, *scale))
        )
        # vLLM keeps image features by hash; the old weights made them.
        await answered(self._llm, self._llm.reset_encoder_cache())
        faults = [pickle.loads(fault) for fault in results if fault]
        if faults:
            # The worker with damaged weights says more than those whose broadcast only ended.
            raise min(faults, key=lambda fault: isinstance(fault, BroadcastFailed))

    async def profile(self, path: str | None) -> None:
        """Begin or end a profile by vLLM's own profiler: a file for each worker."""
        if path is None:
            return await answered(self._llm, self._llm.start_profile())
        await answered(self._llm, self._llm.stop_profile())
        stem = path.removesuffix(".json.gz")
        for number, file in enumerate(sorted(Path(self._profiles).glob("*.json.gz"))):
            await asyncio.to_thread(shutil.move, file, f"{stem}-{number}.json.gz")

    def health(self) -> EngineHealth:
        """Raises WorkerLost when vLLM's processes are dead."""
        alive(self._llm)
        # Without requests vLLM reports nothing new.
        if not self._running:
            return EngineHealth(self._version, 0, 0, 0.0)
        waiting = min(self._load.waiting, self._running)
        return EngineHealth(self._version, self._running - waiting, waiting, self._load.cache)

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown(timeout=0)

    def _prompt(
        self, prompt: TokenPrompt, tokens: Sequence[int], images: Sequence[Image.Image]
    ) -> dict[str, Any]:
        """Return vLLM's tokens prompt: one image token per image, and the images."""
        request: dict[str, Any] = {"prompt_token_ids": tokens}
        if prompt.images:
            hashes = [image.ref.sha256 for image in prompt.images]
            request["multi_modal_data"] = {"image": list(images)}
            request["multi_modal_uuids"] = {"image": hashes}
        return request

    def _image(self, image: PromptImage) -> Image.Image:
        """Return the decoded image. It runs in a thread, to not delay health checks."""
        return self._images.made(image.ref.sha256, lambda: picture(image, self._patch))


def _arguments(
    model: ModelSettings,
    settings: VllmEngineSettings,
    limits: Mapping[str, Any],
    lora: LoraSettings | None,
) -> dict[str, Any]:
    """Return arguments of ``AsyncEngineArgs``.

    Log-probs come from the distribution that is sampled: masked, and divided by the temperature.
    """
    arguments = common_arguments(model.path, settings) | {
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_K + TIED_TOKENS,
        "use_tqdm_on_load": False,  # its lock would leave a semaphore behind
    }
    if limits:
        arguments["mm_processor_kwargs"] = dict(limits)
        # vLLM measures its memory with the largest input of each kind, and a video is very large.
        arguments["limit_mm_per_prompt"] = {"video": 0}
    if lora:
        arguments["enable_lora"] = True
        # vLLM takes certain ranks only; a smaller adapter is padded.
        arguments["max_lora_rank"] = next(rank for rank in VLLM_RANKS if rank >= lora.rank)
        arguments["lora_target_modules"] = list(lora.targets)
    return arguments | settings.extra


def _parameters(prompt: TokenPrompt, sampling: Sampling, vocabulary: int, masks: bool) -> Any:
    """Return vLLM's sampling parameters.

    The context length keeps the turns of an episode apart when they share a seed. During
    ``min_tokens`` vLLM masks the tokenizer's own end token as well, which is one of ``end_tokens``
    when there are any.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    most = sampling.effective_top_k
    temperature = sampling.temperature
    top_k = most or 0
    # With return_sampling_mask vLLM needs a temperature and a top_k.
    if masks and not top_k:
        top_k = vocabulary if temperature else 1
        temperature = temperature or 1.0
    min_tokens = 0
    if sampling.end_tokens or sampling.stop:
        min_tokens = min(sampling.min_tokens, sampling.max_tokens)
    return SamplingParams(
        temperature=temperature,
        top_p=sampling.top_p if most else 1.0,
        top_k=top_k,
        max_tokens=sampling.max_tokens,
        min_tokens=min_tokens,
        seed=derive(prompt.seed, len(prompt.token_ids)),
        logit_bias=dict.fromkeys(sampling.banned_tokens, -np.inf) or None,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        stop_token_ids=list(sampling.end_tokens),
        # The tokenizer's end token counts only where
        # ``end_tokens`` names it, and so does the trainer's mask.
        ignore_eos=True,
        # Text is needed for stop strings alone; detokenising costs the event loop time.
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        logprobs=min(most + TIED_TOKENS, vocabulary) if most and not masks else 0,
        # An object for each log-prob would cost garbage collection more than the numbers.
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: Any, sampling: Sampling, version: Version) -> Completion:
    """Return the turn from vLLM's output.

    At each position vLLM returns log-probs of the sampled token and of the likeliest ones, -inf
    where ``top_p`` or ``top_k`` removed them: the others are the kept tokens, unless it returns
    these as a sampling mask. Raises InfrastructureFailure when more may be kept than came back.
    """
    finish = _finish(output)
    logprobs = np.array(output.logprobs.logprobs).reshape(len(output.token_ids), -1)
    token_mask = None
    if sampling.effective_top_k is not None:
        rows = _kept_rows(output, logprobs)
        if max(map(len, rows)) >= sampling.effective_top_k + TIED_TOKENS:
            raise InfrastructureFailure(
                f"vLLM kept {TIED_TOKENS} or more tokens above top_k ({sampling.effective_top_k}),"
                " all as likely as the last"
            )
        token_mask = TokenMask.of(rows)
    token_ids = tuple(output.token_ids)
    return Completion(token_ids, tuple(logprobs[:, 0].tolist()), finish, version, token_mask)


def _kept_rows(output: Any, logprobs: npt.NDArray[np.float64]) -> Any:
    """Return the kept tokens of each position, whose log-probs [n, 1 + k] are ``logprobs``."""
    if output.sampling_mask:
        return output.sampling_mask.token_ids
    ids = np.array(output.logprobs.token_ids).reshape(len(logprobs), -1)[:, 1:]
    is_kept = np.isfinite(logprobs[:, 1:])
    return [row[mask] for row, mask in zip(ids, is_kept, strict=True)]


def _finish(output: Any) -> FinishReason:
    """Return why the turn ended. Raises WorkerLost for a request that vLLM gave up."""
    match output.finish_reason, output.stop_reason:
        case "length", _:
            return FinishReason.LENGTH
        case "stop", str():
            return FinishReason.STOP_STRING
        case "stop", _:
            return FinishReason.END_TOKEN
    raise WorkerLost(f"vLLM ended a request: {output.finish_reason}")
