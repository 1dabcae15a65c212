"""Generation with Hugging Face transformers.

The event loop chooses batches; a single worker thread decodes one batch at a time. A batch that has
started takes no further requests, and each of its turns is returned when it ends.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from rayloop.chat.tokenizer import load_tokenizer
from rayloop.core.failures import InfrastructureFailure, WorkerLost
from rayloop.core.kept import Kept
from rayloop.core.protocols import EngineHealth, Manifest
from rayloop.core.types import Completion, FinishReason, Sampling, TokenIds, TokenPrompt, Version
from rayloop.engines import profiling
from rayloop.engines.generation.decoding import Decoder, DecodeRequest
from rayloop.engines.models import copy_weights, hf_state, load_model, load_vision
from rayloop.engines.settings import EnginePlace, ModelSettings, TransformersEngineSettings
from rayloop.transports.manifest import DTYPES

FIRST = 0.05
"""Seconds to wait before the first batch."""
SHORTEST = 0.002
SHARE = 0.25
"""Longest wait, as a share of the last batches' mean duration.

Longer pauses separate batches and do not count.
"""
BATCHES = 8
"""Number of last batches whose pauses count."""


class Arrivals:
    """A batch that is not full starts when no request came for ``wait`` seconds: twice the longest
    pause of the last batches. Too early leaves requests to a second batch, which takes nearly as
    long; a long wait delays all.
    """

    def __init__(self) -> None:
        self.wait = FIRST
        self._last = float("-inf")
        self._pauses: deque[float] = deque(maxlen=BATCHES)
        self._seconds: deque[float] = deque(maxlen=BATCHES)

    def decoded(self, arrivals: Sequence[float], seconds: float) -> None:
        """Count a batch that took ``seconds``, whose requests came at ``arrivals`` (seconds,
        ascending). A short pause before its first request counts: that request just missed the
        previous batch.
        """
        self._seconds.append(seconds)
        longest = SHARE * mean(self._seconds)
        pauses = [later - earlier for earlier, later in pairwise((self._last, *arrivals))]
        self._last = arrivals[-1]
        if known := [pause for pause in pauses if pause <= longest]:
            self._pauses.append(max(known))
            self.wait = min(max(2 * max(self._pauses), SHORTEST), max(longest, SHORTEST))


COHORT_WAIT = 120.0
"""Seconds to wait, with ``rollout.deterministic``, for all members of a group (a cohort).

Then the waiting members fail and are retried alone: the run continues, but is not repeatable bit
for bit.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    prompt: TokenPrompt
    sampling: Sampling
    answer: asyncio.Future[Completion]
    arrival: float
    """On the event loop's clock, in seconds."""


class TransformersEngine:
    """A ``GenerationEngine``.

    It serves nothing until the first ``load``: the weights of the folder have no version.
    """

    def __init__(
        self, model: ModelSettings, settings: TransformersEngineSettings, place: EnginePlace
    ) -> None:
        self._settings = settings
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = (
            load_model(model, dtype=DTYPES[settings.dtype]).requires_grad_(False).to(device)
        )
        self._parameters = hf_state(self._model)
        self._decoder = Decoder(
            self._model, load_tokenizer(Path(model.path)), load_vision(model, self._model.config)
        )
        number = settings.threads or torch.get_num_threads()
        # torch keeps the number of threads for each thread, so it is set where the work is done.
        self._worker = ThreadPoolExecutor(
            1, "decode", initializer=torch.set_num_threads, initargs=(number,)
        )
        self._version: Version | None = None
        self._paused = False
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._left: Counter[str] = Counter()
        self._arrivals = Arrivals()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._service: asyncio.Task[None] | None = None

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        """Sample one turn.

        Raises WorkerLost without loaded weights, DataFailure for a prompt that cannot be used.
        """
        loop = asyncio.get_running_loop()
        # A request has a running event loop; the constructor may have none.
        if self._service is None or self._service.done():
            self._service = loop.create_task(self._serve())
        request = _Request(prompt, sampling, loop.create_future(), loop.time())
        self._waiting.append(request)
        self._changed.set()
        return await request.answer

    async def leave(self, cohort: str) -> None:
        """Wait for one member less of ``cohort``."""
        self._left[cohort] += 1
        self._changed.set()

    async def pause(self) -> None:
        """Start no batch; returns when the running one has ended."""
        self._paused = True
        await self._idle.wait()

    async def resume(self) -> None:
        """Start batches again."""
        self._paused = False
        self._changed.set()

    async def load(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Verify, then copy into the model in place (a tied head follows its embedding).

        Raises WeightSyncError. ``tensors`` [name] are whole and on any device; they are converted
        to the engine's dtype.
        """
        self._version = None
        await asyncio.get_running_loop().run_in_executor(
            self._worker, self._copy, manifest, tensors
        )
        self._left.clear()  # a restored run plays its groups again under their old names
        self._version = manifest.version

    async def profile(self, path: str | None) -> None:
        """As ``ProfiledEngine`` says."""
        await asyncio.to_thread(profiling.profile, path)

    def health(self) -> EngineHealth:
        """Version, running and waiting requests."""
        return EngineHealth(
            self._version,
            sum(not request.answer.done() for request in self._running),
            len(self._waiting),
        )

    def close(self) -> None:
        """Stop serving; requests that still wait are cancelled.

        The running batch ends in its own time.
        """
        if self._service is not None:
            self._service.cancel()
        for request in self._waiting + self._running:
            request.answer.cancel()
        self._worker.shutdown(wait=False)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch, due = self._choose(loop.time())
            version = self._version
            if not batch or version is None:
                await self._wait(due)
                continue
            # Identity decides (``eq=False``): two requests of a group may be equal in all fields.
            self._waiting = [request for request in self._waiting if request not in batch]
            self._running, began = batch, loop.time()
            self._idle.clear()
            try:
                await loop.run_in_executor(
                    self._worker, self._decoder.decode, [_row(one, version, loop) for one in batch]
                )
            except Exception as error:  # the callers get it, and the next batch is tried
                for request in batch:
                    _fail(
                        request,
                        WorkerLost(f"decoding a batch of {len(batch)} failed: {error!r}"),
                        error,
                    )
            finally:
                self._running = []
                self._idle.set()
                self._arrivals.decoded(
                    sorted(request.arrival for request in batch), loop.time() - began
                )

    async def _wait(self, seconds: float | None) -> None:
        """Until a request, a departure or ``resume`` arrives, at most ``seconds``."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _choose(self, now: float) -> tuple[list[_Request], float | None]:
        """The next batch, or an empty one and the seconds until a waiting period ends."""
        self._waiting = [request for request in self._waiting if not request.answer.done()]
        if self._paused or not self._waiting:
            return [], None
        if self._version is None:
            for request in self._waiting:
                _fail(
                    request,
                    WorkerLost(
                        "the engine has no weights: the last load failed, or none has succeeded yet"
                    ),
                )
            return [], None

        # A group that is complete goes first, as a batch
        # of its own; other requests fill the time between.
        deadlines: list[float] = []
        for cohort, members in self._cohorts().items():
            deadlines.append(members[0].arrival + COHORT_WAIT)
            size = members[0].prompt.cohort.size if members[0].prompt.cohort else 0
            missing = size - self._left[cohort] - len(members)
            if missing <= 0:
                # Requests come in any order; the order within
                # a batch changes its bits, so it is fixed.
                return (
                    sorted(
                        members, key=lambda request: (request.prompt.seed, request.prompt.token_ids)
                    ),
                    None,
                )
            if now >= deadlines[-1]:
                waited = f"{missing} of group {cohort} did not come within {COHORT_WAIT:g} s"
                why = (
                    f"rollout.deterministic: {waited}. Give the machine less to do, or leave"
                    " deterministic out"
                )
                for request in (
                    members
                ):  # a batch without the missing ones would give other bits than a repeated run
                    _fail(request, InfrastructureFailure(why))
                return [], 0.0
        if free := [request for request in self._waiting if request.prompt.cohort is None]:
            deadlines.append(free[-1].arrival + self._arrivals.wait)
            if len(free) >= self._settings.max_sequences or now >= deadlines[-1]:
                return free[: self._settings.max_sequences], None
        return [], max(0.0, min(deadlines) - now)

    def _cohorts(self) -> dict[str, list[_Request]]:
        cohorts: dict[str, list[_Request]] = {}
        for request in self._waiting:
            if request.prompt.cohort is not None:
                cohorts.setdefault(request.prompt.cohort.key, []).append(request)
        return cohorts

    def _copy(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """In the worker thread, hence never while a batch is decoded."""
        copy_weights(manifest, tensors, self._parameters)
        self._decoder.forget()


def _row(request: _Request, version: Version, loop: asyncio.AbstractEventLoop) -> DecodeRequest:
    def finish(
        token_ids: TokenIds, logprobs: tuple[float, ...], reason: FinishReason, kept: Kept | None
    ) -> None:
        # asyncio's futures belong to the loop's thread; the decoder runs in another one.
        loop.call_soon_threadsafe(
            _answer, request, Completion(token_ids, logprobs, reason, version, kept)
        )

    def fail(error: Exception) -> None:
        loop.call_soon_threadsafe(_fail, request, error)

    return DecodeRequest(request.prompt, request.sampling, finish, fail, request.answer.done)


def _answer(request: _Request, completion: Completion) -> None:
    # The caller may have been cancelled meanwhile, and a future takes one result.
    if not request.answer.done():
        request.answer.set_result(completion)


def _fail(request: _Request, error: Exception, cause: Exception | None = None) -> None:
    if not request.answer.done():
        error.__cause__ = cause
        request.answer.set_exception(error)
