"""What the endpoint does between HTTP and the run's engines: a chat becomes tokens, answers become chat completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from prometheus_client import Counter, Gauge

from rayloop.chat.rendering import Renderer
from rayloop.core.deadlines import bounded
from rayloop.core.failures import DataFailure, DeadlineExceeded, InfrastructureFailure, OverLongPrompt
from rayloop.core.threads import in_thread
from rayloop.core.traces import Trace, image_json
from rayloop.core.types import Completion, FinishReason, Sampling, TokenPrompt, Version, derive
from rayloop.serve_apps.metrics import RequestMetrics
from rayloop.serve_apps.policy.api import ChatMessage, ChatRequest
from rayloop.serve_apps.policy.engines import Engines
from rayloop.serve_apps.policy.history import Conversation, Histories
from rayloop.serve_apps.policy.messages import answer_of, images_of
from rayloop.serve_apps.policy.settings import PolicySettings


class Metrics(RequestMetrics):
    """Of the one replica; each series names its run."""

    def __init__(self, run: str) -> None:
        super().__init__("policy", {"run": run}, "Answers that are being sampled or wait.")
        self.prompted: Counter = self._one(Counter, "prompt_tokens", "Tokens of prompts, each prompt once.")
        self.sampled: Counter = self._one(Counter, "sampled_tokens", "Tokens of answers.")
        self.engines: Gauge = self._one(Gauge, "engines", "Engines that serve weights.")
        self.step: Gauge = self._one(Gauge, "weight_step", "The step of the newest weights that an engine serves; -1: none.")


class Overloaded(InfrastructureFailure):
    """As many answers are held as ``limits.held`` allows."""


class PolicyService:
    """``async with service.running()``: engines are looked for while the block runs."""

    def __init__(self, settings: PolicySettings, engines: Engines) -> None:
        self.settings, self.engines = settings, engines
        self.renderer = Renderer(settings.model)
        self._histories = Histories(self.renderer, settings.limits.history)
        self._held = 0
        self._began = int(time.time())
        self._metrics = Metrics(settings.run)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.engines:
            yield

    def failing(self) -> dict[str, str]:
        """Condition -> why it fails, among engines and queue; empty when it can answer."""
        limit = self.settings.limits.held
        full = f"{self._held} answers are held, the limit is {limit}" if self._held >= limit else ""
        return {name: why for name, why in (("engines", self.engines.why), ("queue", full)) if why}

    def model(self) -> dict[str, Any]:
        """The one entry of ``/v1/models``."""
        s, version = self.settings, self.engines.version
        return {
            "id": s.run, "object": "model", "created": self._began, "owned_by": "rayloop", "root": s.model.path,
            "max_model_len": s.tokens, "weight_version": None if version is None else str(version),
        }  # fmt: skip

    async def chat(self, asked: ChatRequest) -> dict[str, Any]:
        """A chat completion. Raises DataFailure for what cannot be asked, OverLongPrompt, Overloaded, DeadlineExceeded, and
        InfrastructureFailure when the engines fail."""
        limits = self.settings.limits
        late = DeadlineExceeded(f"no answer within limits.seconds ({limits.seconds:g} s): {self.engines.why or 'busy'}")
        with self._metrics.request("chat"):
            self._check(asked)
            with self._holding(asked.n or 1):
                return await bounded(limits.seconds, self._chat(asked), late)

    def metrics(self) -> bytes:
        """As Prometheus reads them."""
        version = self.engines.version
        self._metrics.engines.set(len(self.engines.serving))
        self._metrics.step.set(-1 if version is None else version.step)
        return self._metrics.text()

    def trace(self, name: str) -> Trace | None:
        """Of the conversation up to the answer ``<id>/<choice>``; None when it is not known (any more). Raises DataFailure."""
        known = self._histories.named(name)
        return None if known is None else known.trace()

    def sampling_of(self, name: str) -> Sampling | None:
        """With which that answer was sampled."""
        known = self._histories.named(name)
        return None if known is None else known.sampling

    async def _chat(self, asked: ChatRequest) -> dict[str, Any]:
        s = self.settings
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
        shown = tools if asked.tool_choice != "none" else []
        conversation = await in_thread(self._histories.prompt, asked.messages, shown, asked.continues, timeout=s.limits.seconds)
        tokens = conversation.token_ids
        if len(tokens) >= s.tokens:
            raise OverLongPrompt(len(tokens), s.tokens - 1)
        sampling = self._sampling(asked, s.tokens - len(tokens))
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        seeds = [derive(seed, "choice", index) for index in range(asked.n or 1)]
        prompt = TokenPrompt(tokens, conversation.images, affinity=conversation.continues)
        completions = await self.engines.sample(prompt, seeds, sampling)
        return self._answer(asked, conversation, completions, sampling, bool(shown), seed)

    def _answer(
        self,
        asked: ChatRequest,
        conversation: Conversation,
        completions: Sequence[Completion],
        sampling: Sampling,
        tools: bool,
        seed: int,
    ) -> dict[str, Any]:
        name = f"chatcmpl-{secrets.token_hex(12)}"
        choices = []
        for index, completion in enumerate(completions):
            choice, message = self._choice(index, asked, completion, sampling, tools)
            self._histories.remember(f"{name}/{index}", conversation.answered(completion, sampling), message)
            choices.append(choice)
        versions = sorted({completion.version for completion in completions})
        prompt, sampled = conversation.token_ids, sum(len(one.token_ids) for one in completions)
        self._metrics.prompted.inc(len(prompt))
        self._metrics.sampled.inc(sampled)
        return {
            "id": name, "object": "chat.completion", "created": int(time.time()), "model": self.settings.run,
            "system_fingerprint": f"{self.settings.run}@{versions[0]}", "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled,
            },
            **({"prompt_token_ids": list(prompt)} if asked.return_token_ids else {}),
            "weight_version": str(versions[0]),
            "rayloop": {
                **_version(versions[0]), "seed": seed, "images": [image_json(image.ref) for image in conversation.images],
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
        text, stopped = self._text(completion, sampling, bool(asked.include_stop_str_in_output) or tools)
        message = answer_of(text, tools)
        if tools and not message.tool_calls and not asked.include_stop_str_in_output:
            message = answer_of(self._text(completion, sampling, whole=False)[0], tools=False)
        reason = "length" if completion.finish is FinishReason.LENGTH else "stop"
        told: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.tool_calls:
            reason = "tool_calls"
            told["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        choice = {
            "index": index, "message": told, "finish_reason": reason, "stop_reason": stopped,
            "logprobs": self._logprobs(asked, completion) if asked.logprobs else None,
            **({"token_ids": list(completion.token_ids)} if asked.return_token_ids else {}),
            "weight_version": str(completion.version),
        }  # fmt: skip
        return choice, message

    def _text(self, completion: Completion, sampling: Sampling, whole: bool) -> tuple[str, str | None]:
        """The turn's text, and the stop string that ended it: the text ends behind it when ``whole``, else before."""
        text = self.renderer.decode(completion.token_ids)
        if completion.finish is not FinishReason.STOP_STRING:
            return text, None
        at, stop = min((text.index(stop), stop) for stop in sampling.stop if stop in text)
        return text[: at + len(stop) * whole], stop

    def _logprobs(self, asked: ChatRequest, completion: Completion) -> dict[str, Any]:
        content = []
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            text = self.renderer.shown((token,))
            content.append(
                {
                    "token": f"token_id:{token}" if asked.return_tokens_as_token_ids else text,
                    "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": [],
                }
            )  # fmt: skip
        return {"content": content, "refusal": None}

    def _sampling(self, asked: ChatRequest, room: int) -> Sampling:
        s = self.settings
        most = min(asked.max_completion_tokens or asked.max_tokens or s.max_tokens, room)
        least = min(s.min_tokens if asked.min_tokens is None else asked.min_tokens, most)
        temperature = s.temperature if asked.temperature is None else asked.temperature
        return self.renderer.sampling(Sampling(temperature, most, least, asked.stops))

    def _check(self, asked: ChatRequest) -> None:
        limits = self.settings.limits
        if (asked.n or 1) > limits.choices:
            raise DataFailure("n", f"{asked.n} answers, limits.choices allows {limits.choices}")
        if (images := images_of(asked.messages)) > self.settings.images:
            raise DataFailure("messages", f"{images} images, the run's episodes have at most {self.settings.images}")

    @contextmanager
    def _holding(self, answers: int) -> Iterator[None]:
        limit = self.settings.limits.held
        if self._held and self._held + answers > limit:
            raise Overloaded(f"{self._held} answers are held, limits.held is {limit}")
        self._held += answers
        self._metrics.held.set(self._held)
        try:
            yield
        finally:
            self._held -= answers
            self._metrics.held.set(self._held)


def _version(version: Version) -> Mapping[str, int]:
    return {"lineage": version.lineage, "step": version.step}
