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
from rayloop.core.protocols import EngineHealth, Manifest
from rayloop.core.token_mask import TokenMask
from rayloop.core.types import Completion, FinishReason, Sampling, TokenIds, TokenPrompt, Version
from rayloop.engines import profiling
from rayloop.engines.attention import attention_name
from rayloop.engines.generation.decoding import Decoder, DecodeRequest
from rayloop.engines.models import copy_weights, hf_state, load_model, load_vision
from rayloop.engines.settings import EnginePlace, ModelSettings, TransformersEngineSettings
from rayloop.transports.manifest import DTYPES

FIRST_WAIT_S = 0.05
"""Seconds to wait before the first batch."""
SHORTEST_WAIT_S = 0.002
"""Seconds to wait at least before a batch."""
LONGEST_WAIT_SHARE = 0.25
"""Longest wait, as a share of the last batches' mean duration.

Longer pauses separate batches and do not count.
"""
COUNTED_BATCHES = 8
"""Number of last batches whose pauses count."""


class Arrivals:
    """Decides when a batch that is not full starts: when no request came for ``wait`` seconds.

    That is twice the longest pause of the last batches. Too early leaves requests to a second
    batch, which takes nearly as long; a long wait delays all.
    """

    def __init__(self) -> None:
        self.wait = FIRST_WAIT_S
        self._last = float("-inf")
        self._pauses: deque[float] = deque(maxlen=COUNTED_BATCHES)
        self._seconds: deque[float] = deque(maxlen=COUNTED_BATCHES)

    def decoded(self, arrivals: Sequence[float], seconds: float) -> None:
        """Count a batch that took ``seconds``, whose requests came at ``arrivals``.

        The latter are in seconds, ascending. A short pause before its first request counts: that
        request just missed the previous batch.
        """
        self._seconds.append(seconds)
        longest = LONGEST_WAIT_SHARE * mean(self._seconds)
        pauses = [later - earlier for earlier, later in pairwise((self._last, *arrivals))]
        self._last = arrivals[-1]
        counted = [pause for pause in pauses if pause <= longest]
        if counted:
            self._pauses.append(max(counted))
            wait = max(2 * max(self._pauses), SHORTEST_WAIT_S)
            self.wait = min(wait, max(longest, SHORTEST_WAIT_S))


COHORT_TIMEOUT_S = 120.0
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
        loaded_model = load_model(model, dtype=DTYPES[settings.dtype])
        self._model = loaded_model.requires_grad_(False).to(device)
        self._parameters = hf_state(self._model)
        tokenizer = load_tokenizer(Path(model.path))
        self._decoder = Decoder(self._model, tokenizer, load_vision(model, self._model.config))
        number = settings.threads or torch.get_num_threads()
        # torch keeps the number of threads for each thread, so it is set where the work is done.
        self._worker = ThreadPoolExecutor(
            1, "decode", initializer=torch.set_num_threads, initargs=(number,)
        )
        self._version: Version | None = None
        self._paused = False
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._departures: Counter[str] = Counter()
        self._arrivals = Arrivals()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._service: asyncio.Task[None] | None = None

    @property
    def attention(self) -> str:
        """The name of the language model's attention kernel."""
        return attention_name(self._model)

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
        self._departures[cohort] += 1
        self._changed.set()

    async def pause(self) -> None:
        """Start no batch; return when the running one has ended."""
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
        # A restored run plays its groups again under their old names.
        self._departures.clear()
        self._version = manifest.version

    async def profile(self, path: str | None) -> None:
        """Begin or end a profile, as ``ProfiledEngine``."""
        await asyncio.to_thread(profiling.profile, path)

    def health(self) -> EngineHealth:
        """Return the version, and the numbers of running and waiting requests."""
        running = sum(not request.answer.done() for request in self._running)
        return EngineHealth(self._version, running, len(self._waiting))

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
            self._running = batch
            start_time = loop.time()
            self._idle.clear()
            rows = [_row(request, version, loop) for request in batch]
            try:
                await loop.run_in_executor(self._worker, self._decoder.decode, rows)
            except Exception as error:  # the callers get it, and the next batch is tried
                reason = f"decoding a batch of {len(batch)} failed: {error!r}"
                for request in batch:
                    _fail(request, WorkerLost(reason), error)
            finally:
                self._running = []
                self._idle.set()
                arrivals = sorted(request.arrival for request in batch)
                self._arrivals.decoded(arrivals, loop.time() - start_time)

    async def _wait(self, seconds: float | None) -> None:
        """Wait until a request, a departure or ``resume`` arrives, at most ``seconds``."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _choose(self, now: float) -> tuple[list[_Request], float | None]:
        """Return the next batch, or an empty one and the seconds until a waiting period ends."""
        self._waiting = [request for request in self._waiting if not request.answer.done()]
        if self._paused or not self._waiting:
            return [], None
        if self._version is None:
            reason = "the engine has no weights: the last load failed, or none has succeeded yet"
            for request in self._waiting:
                _fail(request, WorkerLost(reason))
            return [], None

        # A complete group goes first, as a separate batch;
        # other requests fill the time between.
        deadlines: list[float] = []
        for cohort, members in self._cohorts().items():
            deadline = members[0].arrival + COHORT_TIMEOUT_S
            missing = self._missing(cohort, members)
            if missing <= 0:
                # Requests come in any order; the order within
                # a batch changes its bits, so it is fixed.
                return sorted(members, key=_seed_and_prompt), None
            if now >= deadline:
                # A batch without the missing ones would give other bits than a repeated run.
                _give_up(cohort, members, missing)
                return [], 0.0
            deadlines.append(deadline)
        without_cohort = [request for request in self._waiting if request.prompt.cohort is None]
        if without_cohort:
            deadlines.append(without_cohort[-1].arrival + self._arrivals.wait)
            most = self._settings.max_sequences
            if len(without_cohort) >= most or now >= deadlines[-1]:
                return without_cohort[:most], None
        return [], max(0.0, min(deadlines) - now)

    def _missing(self, cohort: str, members: Sequence[_Request]) -> int:
        """Return how many members of the cohort have neither come nor left."""
        settings = members[0].prompt.cohort
        size = settings.size if settings else 0
        return size - self._departures[cohort] - len(members)

    def _cohorts(self) -> dict[str, list[_Request]]:
        cohorts: dict[str, list[_Request]] = {}
        for request in self._waiting:
            if request.prompt.cohort is not None:
                cohorts.setdefault(request.prompt.cohort.key, []).append(request)
        return cohorts

    def _copy(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights; in the worker thread, hence never while a batch is decoded."""
        copy_weights(manifest, tensors, self._parameters)
        self._decoder.forget()


def _seed_and_prompt(request: _Request) -> tuple[int, TokenIds]:
    return request.prompt.seed, request.prompt.token_ids


def _give_up(cohort: str, members: Sequence[_Request], missing: int) -> None:
    """Fail the members of a cohort that stayed incomplete."""
    reason = f"{missing} of group {cohort} did not come within {COHORT_TIMEOUT_S:g} s"
    for request in members:
        failure = InfrastructureFailure(
            f"rollout.deterministic: {reason}. Give the machine less to do, or leave deterministic"
            " out"
        )
        _fail(request, failure)


def _row(request: _Request, version: Version, loop: asyncio.AbstractEventLoop) -> DecodeRequest:
    def finish(
        token_ids: TokenIds,
        logprobs: tuple[float, ...],
        reason: FinishReason,
        token_mask: TokenMask | None,
    ) -> None:
        # asyncio's futures belong to the loop's thread; the decoder runs in another one.
        completion = Completion(token_ids, logprobs, reason, version, token_mask)
        loop.call_soon_threadsafe(_answer, request, completion)

    def fail(error: Exception) -> None:
        loop.call_soon_threadsafe(_fail, request, error)

    return DecodeRequest(request.prompt, request.sampling, finish, fail, request.answer.done)


def _answer(request: _Request, completion: Completion) -> None:
    # The caller may have been cancelled by now, and a future takes one result.
    if not request.answer.done():
        request.answer.set_result(completion)


def _fail(request: _Request, error: Exception, cause: Exception | None = None) -> None:
    if not request.answer.done():
        error.__cause__ = cause
        request.answer.set_exception(error)
