"""The policy endpoint between HTTP and the run's engines.

A chat becomes tokens, and sampled tokens become chat completions.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import Counter, Gauge

from rayloop.chat.openai.answers import Chats
from rayloop.chat.openai.api import DISTRIBUTION, ChatRequest, images_of
from rayloop.chat.rendering import Renderer
from rayloop.core.deadlines import bounded
from rayloop.core.failures import DataFailure, DeadlineExceeded, OverLongPrompt
from rayloop.core.threads import in_thread
from rayloop.core.types import Sampling, TokenPrompt, derive
from rayloop.serve_apps.policy.engines import Engines
from rayloop.serve_apps.settings import PolicyEndpointSettings
from rayloop.web import RequestMetrics

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM.

Logits that are divided by less leave the range of float32.
"""


class PolicyService:
    """Answers chats with the run's engines, within the limits.

    Inside ``running`` it searches for engines.
    """

    def __init__(self, settings: PolicyEndpointSettings, engines: Engines) -> None:
        self.settings = settings
        self.engines = engines
        self.renderer = Renderer(settings.model)
        self.chats = Chats(settings.run, self.renderer, settings.limits.history)
        metrics = RequestMetrics("policy", {"run": settings.run}, "answers", settings.limits.held)
        self._metrics = metrics
        self._prompted: Counter = metrics.one(
            Counter, "prompt_tokens", "Tokens of prompts, each prompt once."
        )
        self._sampled: Counter = metrics.one(Counter, "sampled_tokens", "Tokens of answers.")
        self._serving: Gauge = metrics.one(Gauge, "engines", "Engines that serve weights.")
        self._step: Gauge = metrics.one(
            Gauge, "weight_step", "The step of the newest weights that an engine serves; -1: none."
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for engines while the block runs."""
        async with self.engines:
            yield

    def failing(self) -> dict[str, str]:
        """Each of engines and queue that fails, and why; empty when the endpoint can answer."""
        failures = {"engines": self.engines.why, "queue": self._metrics.full()}
        return {name: reason for name, reason in failures.items() if reason}

    def scrape(self) -> bytes:
        """The metrics in Prometheus' text format."""
        version = self.engines.version
        self._serving.set(len(self.engines.serving))
        self._step.set(-1 if version is None else version.step)
        return self._metrics.text()

    def model(self) -> dict[str, Any]:
        """The one entry of ``/v1/models``."""
        version = self.engines.version
        return self.chats.model() | {
            "root": self.settings.model.path,
            "max_model_len": self.settings.tokens,
            "weight_version": None if version is None else str(version),
        }

    async def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """A chat completion.

        Raises DataFailure, OverLongPrompt, Overloaded, DeadlineExceeded, InfrastructureFailure.
        """
        seconds = self.settings.limits.seconds
        state = self.engines.why or "busy"
        timeout_error = DeadlineExceeded(
            f"no answer within limits.seconds ({seconds:g} s): {state}"
        )
        with self._metrics.request("chat"):
            self._check(asked)
            with self._metrics.holding(asked.n or 1):
                return await bounded(seconds, self._chat(asked), timeout_error)

    def _check(self, request: ChatRequest) -> None:
        """Raise DataFailure for a request that the endpoint does not accept."""
        for key, value in request.distribution.items():
            raise DataFailure(key, f"{value!r} is not supported, only {DISTRIBUTION[key][0]!r}")
        max_choices = self.settings.limits.choices
        if (request.n or 1) > max_choices:
            raise DataFailure("n", f"{request.n} answers, limits.choices allows {max_choices}")
        images = images_of(request.messages)
        max_images = self.settings.images
        if images > max_images:
            raise DataFailure(
                "messages", f"{images} images, the run's episodes have at most {max_images}"
            )

    async def _chat(self, request: ChatRequest) -> dict[str, Any]:
        settings = self.settings
        timeout = settings.limits.seconds
        conversation = await in_thread(self.chats.prompt, request, timeout=timeout)
        tokens = conversation.token_ids
        if len(tokens) >= settings.tokens:
            raise OverLongPrompt(len(tokens), settings.tokens - 1)
        sampling = self._sampling(request, settings.tokens - len(tokens))
        seed = secrets.randbits(63) if request.seed is None else request.seed
        seeds = [derive(seed, "choice", index) for index in range(request.n or 1)]
        prompt = TokenPrompt(tokens, conversation.images, affinity=conversation.continues)
        completions = await self.engines.sample(prompt, seeds, sampling)
        self._prompted.inc(len(tokens))
        self._sampled.inc(sum(len(completion.token_ids) for completion in completions))
        answer, _ = self.chats.answer(request, conversation, completions, sampling, seed)
        return answer

    def _sampling(self, request: ChatRequest, room: int) -> Sampling:
        """The request's sampling, with the run's value for each key that it leaves out.

        ``room``: tokens that are left for the answer.
        """
        settings = self.settings
        limit = request.max_completion_tokens or request.max_tokens or settings.max_tokens
        max_tokens = min(limit, room)
        min_tokens = settings.min_tokens if request.min_tokens is None else request.min_tokens
        temperature = request.temperature
        if temperature is None:
            temperature = settings.temperature
        if temperature < GREEDY_BELOW:
            temperature = 0.0
        sampling = Sampling(temperature, max_tokens, min(min_tokens, max_tokens), request.stops)
        return self.renderer.sampling(sampling)
