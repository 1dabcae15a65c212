"""The policy endpoint between HTTP and the run's engines: a chat becomes tokens, sampled tokens become chat completions."""

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import Counter, Gauge

from rayloop.chat.rendering import Renderer
from rayloop.core.deadlines import bounded
from rayloop.core.failures import DataFailure, DeadlineExceeded, OverLongPrompt
from rayloop.core.threads import in_thread
from rayloop.core.traces import image_json
from rayloop.core.types import Completion, FinishReason, Sampling, TokenPrompt, derive
from rayloop.serve_apps.policy.api import ChatMessage, ChatRequest, answer_of, images_of
from rayloop.serve_apps.policy.engines import Engines
from rayloop.serve_apps.policy.history import Conversation, Histories
from rayloop.serve_apps.settings import PolicyEndpointSettings
from rayloop.serve_apps.web import RequestMetrics


class PolicyService:
    """Answers chats with the run's engines, within the limits. Inside ``running`` it keeps looking for engines."""

    def __init__(self, settings: PolicyEndpointSettings, engines: Engines) -> None:
        self.settings, self.engines = settings, engines
        self.renderer = Renderer(settings.model)
        self._histories = Histories(self.renderer, settings.limits.history)
        self._began = int(time.time())
        self._metrics = metrics = RequestMetrics("policy", {"run": settings.run}, "answers", settings.limits.held)
        self._prompted: Counter = metrics.one(Counter, "prompt_tokens", "Tokens of prompts, each prompt once.")
        self._sampled: Counter = metrics.one(Counter, "sampled_tokens", "Tokens of answers.")
        self._serving: Gauge = metrics.one(Gauge, "engines", "Engines that serve weights.")
        self._step: Gauge = metrics.one(Gauge, "weight_step", "The step of the newest weights that an engine serves; -1: none.")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look for engines while the block runs."""
        async with self.engines:
            yield

    def failing(self) -> dict[str, str]:
        """Each of engines and queue that fails, and why; empty when the endpoint can answer."""
        return {name: why for name, why in (("engines", self.engines.why), ("queue", self._metrics.full())) if why}

    def scrape(self) -> bytes:
        """The metrics in Prometheus' text format."""
        version = self.engines.version
        self._serving.set(len(self.engines.serving))
        self._step.set(-1 if version is None else version.step)
        return self._metrics.text()

    def model(self) -> dict[str, Any]:
        """The one entry of ``/v1/models``."""
        s, version = self.settings, self.engines.version
        return {
            "id": s.run, "object": "model", "created": self._began, "owned_by": "rayloop", "root": s.model.path,
            "max_model_len": s.tokens, "weight_version": None if version is None else str(version),
        }  # fmt: skip

    def trace(self, name: str) -> dict[str, Any] | None:
        """The ``Trace`` up to the answer ``<id>/<choice>`` as JSON, with its sampling; None when it is unknown. Raises DataFailure
        when its tokens are not those that were sampled."""
        known = self._histories.named(name)
        if known is None or known.sampling is None:
            return None
        sampling = dataclasses.asdict(known.sampling)
        return {**known.trace().json(), "sampling": sampling, "image_token": self.renderer.image_token}

    async def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """A chat completion. Raises DataFailure, OverLongPrompt, Overloaded, DeadlineExceeded, InfrastructureFailure."""
        limits = self.settings.limits
        late = DeadlineExceeded(f"no answer within limits.seconds ({limits.seconds:g} s): {self.engines.why or 'busy'}")
        with self._metrics.request("chat"):
            if (asked.n or 1) > limits.choices:
                raise DataFailure("n", f"{asked.n} answers, limits.choices allows {limits.choices}")
            if (images := images_of(asked.messages)) > self.settings.images:
                raise DataFailure("messages", f"{images} images, the run's episodes have at most {self.settings.images}")
            with self._metrics.holding(asked.n or 1):
                return await bounded(limits.seconds, self._chat(asked), late)

    async def _chat(self, asked: ChatRequest) -> dict[str, Any]:
        s = self.settings
        tools = [] if asked.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        conversation = await in_thread(self._histories.prompt, asked.messages, tools, asked.continues, timeout=s.limits.seconds)
        tokens = conversation.token_ids
        if len(tokens) >= s.tokens:
            raise OverLongPrompt(len(tokens), s.tokens - 1)
        sampling = self._sampling(asked, s.tokens - len(tokens))
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        seeds = [derive(seed, "choice", index) for index in range(asked.n or 1)]
        prompt = TokenPrompt(tokens, conversation.images, affinity=conversation.continues)
        completions = await self.engines.sample(prompt, seeds, sampling)
        name = f"chatcmpl-{secrets.token_hex(12)}"
        choices = []
        for index, completion in enumerate(completions):
            choice, message = self._choice(index, asked, completion, sampling, bool(tools))
            self._histories.remember(f"{name}/{index}", conversation.answered(completion, sampling), message)
            choices.append(choice)
        return {"id": name, "choices": choices, **self._about(asked, conversation, completions, seed)}

    def _about(
        self, asked: ChatRequest, conversation: Conversation, completions: Sequence[Completion], seed: int
    ) -> dict[str, Any]:
        """The keys of an answer beside its id and its choices."""
        oldest = min(completion.version for completion in completions)
        prompt, sampled = conversation.token_ids, sum(len(one.token_ids) for one in completions)
        self._prompted.inc(len(prompt))
        self._sampled.inc(sampled)
        return {
            "object": "chat.completion", "created": int(time.time()), "model": self.settings.run,
            "system_fingerprint": f"{self.settings.run}@{oldest}",
            "usage": {
                "prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled,
            },
            **({"prompt_token_ids": list(prompt)} if asked.return_token_ids else {}),
            "weight_version": str(oldest),
            "rayloop": {
                "lineage": oldest.lineage, "step": oldest.step, "seed": seed,
                "images": [image_json(image.ref) for image in conversation.images],
                "history": {
                    "exact": conversation.exact, "continues": conversation.continues or None,
                    "why": conversation.why or None,
                },
            },
        }  # fmt: skip

    def _choice(
        self, index: int, asked: ChatRequest, completion: Completion, sampling: Sampling, tools: bool
    ) -> tuple[dict[str, Any], ChatMessage]:
        """A choice of the answer, and its message."""
        text, stop = self.renderer.decode(completion.token_ids), None
        without_stop = text
        if completion.finish is FinishReason.STOP_STRING:
            at, stop = min((text.index(stop), stop) for stop in sampling.stop if stop in text)
            without_stop, text = text[:at], text[: at + len(stop)]
        message = answer_of(text if tools or asked.include_stop_str_in_output else without_stop, tools)
        if tools and not message.tool_calls and not asked.include_stop_str_in_output:
            message = answer_of(without_stop, tools=False)
        reason = "length" if completion.finish is FinishReason.LENGTH else "stop"
        answer: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.tool_calls:
            reason = "tool_calls"
            answer["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        choice = {
            "index": index, "message": answer, "finish_reason": reason, "stop_reason": stop,
            "logprobs": self._logprobs(asked, completion) if asked.logprobs else None,
            **({"token_ids": list(completion.token_ids)} if asked.return_token_ids else {}),
            "weight_version": str(completion.version),
        }  # fmt: skip
        return choice, message

    def _logprobs(self, asked: ChatRequest, completion: Completion) -> dict[str, Any]:
        content = []
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            text = self.renderer.shown((token,))
            name = f"token_id:{token}" if asked.return_tokens_as_token_ids else text
            content.append({"token": name, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _sampling(self, asked: ChatRequest, room: int) -> Sampling:
        """The request's sampling; what it leaves out is the run's. ``room``: tokens that are left for the answer."""
        s = self.settings
        most = min(asked.max_completion_tokens or asked.max_tokens or s.max_tokens, room)
        least = min(s.min_tokens if asked.min_tokens is None else asked.min_tokens, most)
        temperature = s.temperature if asked.temperature is None else asked.temperature
        return self.renderer.sampling(Sampling(temperature, most, least, asked.stops))
