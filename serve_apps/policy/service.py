"""The policy endpoint between HTTP and the run's engines: a chat becomes tokens, sampled tokens
become chat completions.
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
"""A temperature below this is greedy, as in vLLM: logits that are divided by less leave the range
of float32.
"""


class PolicyService:
    """Answers chats with the run's engines, within the limits.

    Inside ``running`` it keeps looking for engines.
    """

    def __init__(self, settings: PolicyEndpointSettings, engines: Engines) -> None:
        self.settings, self.engines = settings, engines
        self.renderer = Renderer(settings.model)
        self.chats = Chats(settings.run, self.renderer, settings.limits.history)
        self._metrics = metrics = RequestMetrics(
            "policy", {"run": settings.run}, "answers", settings.limits.held
        )
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
        return {
            name: why
            for name, why in (("engines", self.engines.why), ("queue", self._metrics.full()))
            if why
        }

    def scrape(self) -> bytes:
        """The metrics in Prometheus' text format."""
        version = self.engines.version
        self._serving.set(len(self.engines.serving))
        self._step.set(-1 if version is None else version.step)
        return self._metrics.text()

    def model(self) -> dict[str, Any]:
        """The one entry of ``/v1/models``."""
        s, version = self.settings, self.engines.version
        more = {
            "root": s.model.path,
            "max_model_len": s.tokens,
            "weight_version": None if version is None else str(version),
        }
        return self.chats.model() | more

    async def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """A chat completion.

        Raises DataFailure, OverLongPrompt, Overloaded, DeadlineExceeded, InfrastructureFailure.
        """
        limits = self.settings.limits
        late = DeadlineExceeded(
            f"no answer within limits.seconds ({limits.seconds:g} s): {self.engines.why or 'busy'}"
        )
        with self._metrics.request("chat"):
            for key, value in asked.distribution.items():
                raise DataFailure(key, f"{value!r} is not supported, only {DISTRIBUTION[key][0]!r}")
            if (asked.n or 1) > limits.choices:
                raise DataFailure("n", f"{asked.n} answers, limits.choices allows {limits.choices}")
            if (images := images_of(asked.messages)) > self.settings.images:
                raise DataFailure(
                    "messages",
                    f"{images} images, the run's episodes have at most {self.settings.images}",
                )
            with self._metrics.holding(asked.n or 1):
                return await bounded(limits.seconds, self._chat(asked), late)

    async def _chat(self, asked: ChatRequest) -> dict[str, Any]:
        s = self.settings
        conversation = await in_thread(self.chats.prompt, asked, timeout=s.limits.seconds)
        tokens = conversation.token_ids
        if len(tokens) >= s.tokens:
            raise OverLongPrompt(len(tokens), s.tokens - 1)
        sampling = self._sampling(asked, s.tokens - len(tokens))
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        seeds = [derive(seed, "choice", index) for index in range(asked.n or 1)]
        prompt = TokenPrompt(tokens, conversation.images, affinity=conversation.continues)
        completions = await self.engines.sample(prompt, seeds, sampling)
        self._prompted.inc(len(tokens))
        self._sampled.inc(sum(len(one.token_ids) for one in completions))
        answer, _ = self.chats.answer(asked, conversation, completions, sampling, seed)
        return answer

    def _sampling(self, asked: ChatRequest, room: int) -> Sampling:
        """The request's sampling; what it leaves out is the run's.

        ``room``: tokens that are left for the answer.
        """
        s = self.settings
        most = min(asked.max_completion_tokens or asked.max_tokens or s.max_tokens, room)
        least = min(s.min_tokens if asked.min_tokens is None else asked.min_tokens, most)
        temperature = s.temperature if asked.temperature is None else asked.temperature
        if temperature < GREEDY_BELOW:
            temperature = 0.0
        return self.renderer.sampling(Sampling(temperature, most, least, asked.stops))
