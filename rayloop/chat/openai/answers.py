"""Chats with the policy as tokens, and sampled tokens as chat completions."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from rayloop.chat.openai.api import ChatMessage, ChatRequest, answer_of
from rayloop.chat.openai.history import Conversation, Histories
from rayloop.chat.rendering import Renderer
from rayloop.core.threads import Cache
from rayloop.core.traces import image_json
from rayloop.core.types import Completion, FinishReason, Sampling


class Chats:
    """The conversations of one policy, whose ``name`` clients send as the model.

    ``history``: the bytes of the conversations that are kept.
    """

    def __init__(self, name: str, renderer: Renderer, history: int) -> None:
        self.name = name
        self.renderer = renderer
        self._histories = Histories(renderer, history)
        self.responses: Cache[str, tuple[ChatMessage, ...]] = Cache(history, _size)
        """The messages up to each response, by its id."""
        self._started = int(time.time())

    def model(self) -> dict[str, Any]:
        """The entry of ``/v1/models``."""
        return {"id": self.name, "object": "model", "created": self._started, "owned_by": "rayloop"}

    def trace(self, name: str) -> dict[str, Any] | None:
        """The ``Trace`` up to the answer ``<id>/<choice>`` as JSON, with its sampling.

        None when the answer is unknown. Raises DataFailure when its tokens are not the sampled
        tokens.
        """
        conversation = self._histories.named(name)
        if conversation is None or conversation.sampling is None:
            return None
        return {
            **conversation.trace().json(),
            "sampling": dataclasses.asdict(conversation.sampling),
            "image_token": self.renderer.image_token,
        }

    def prompt(self, asked: ChatRequest) -> Conversation:
        """The conversation that the request asks to answer.

        It takes some ms of CPU. Raises DataFailure.
        """
        return self._histories.prompt(asked.messages, _tools(asked), asked.continues)

    def answer(
        self,
        asked: ChatRequest,
        prompt: Conversation,
        completions: Sequence[Completion],
        sampling: Sampling,
        seed: int,
    ) -> tuple[dict[str, Any], list[Conversation]]:
        """The chat completion of ``completions``, and the conversations up to its answers.

        Each completion is one choice.
        """
        name = f"chatcmpl-{secrets.token_hex(12)}"
        choices = []
        conversations = []
        for index, completion in enumerate(completions):
            choice, message = self._choice(index, asked, completion, sampling)
            choices.append(choice)
            answered = prompt.answered(completion, sampling)
            conversations.append(self._histories.remember(f"{name}/{index}", answered, message))
        metadata = self._metadata(asked, prompt, completions, seed)
        return {"id": name, "choices": choices, **metadata}, conversations

    def _metadata(
        self,
        asked: ChatRequest,
        conversation: Conversation,
        completions: Sequence[Completion],
        seed: int,
    ) -> dict[str, Any]:
        """The keys of an answer except its id and its choices."""
        oldest = min(completion.version for completion in completions)
        prompt = conversation.token_ids
        sampled = sum(len(completion.token_ids) for completion in completions)
        return {
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": f"{self.name}@{oldest}",
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sampled,
                "total_tokens": len(prompt) + sampled,
            },
            **({"prompt_token_ids": list(prompt)} if asked.return_token_ids else {}),
            "weight_version": str(oldest),
            "rayloop": {
                "lineage": oldest.lineage,
                "step": oldest.step,
                "seed": seed,
                "images": [image_json(image.ref) for image in conversation.images],
                "history": {
                    "exact": conversation.exact,
                    "continues": conversation.continues or None,
                    "why": conversation.why or None,
                },
            },
        }

    def _choice(
        self, index: int, asked: ChatRequest, completion: Completion, sampling: Sampling
    ) -> tuple[dict[str, Any], ChatMessage]:
        """A choice of the answer, and its message."""
        text = self.renderer.decode(completion.token_ids)
        without_stop = text
        stop = None
        if completion.finish is FinishReason.STOP_STRING:
            position, stop = min((text.index(stop), stop) for stop in sampling.stop if stop in text)
            without_stop = text[:position]
            text = text[: position + len(stop)]

        # A stop string may be the end of a call, so calls are looked for with it.
        tools = {tool["function"]["name"] for tool in _tools(asked)}
        message = answer_of(text, tools)
        if not message.tool_calls and not asked.include_stop_str_in_output:
            message = answer_of(without_stop, ())

        reason = "length" if completion.finish is FinishReason.LENGTH else "stop"
        answer: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.tool_calls:
            reason = "tool_calls"
            answer["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        choice = {
            "index": index,
            "message": answer,
            "finish_reason": reason,
            "stop_reason": stop,
            "logprobs": self._logprobs(asked, completion) if asked.logprobs else None,
            **({"token_ids": list(completion.token_ids)} if asked.return_token_ids else {}),
            "weight_version": str(completion.version),
        }
        return choice, message

    def _logprobs(self, asked: ChatRequest, completion: Completion) -> dict[str, Any]:
        content = []
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
            text = self.renderer.shown((token,))
            name = f"token_id:{token}" if asked.return_tokens_as_token_ids else text
            content.append(
                {
                    "token": name,
                    "logprob": logprob,
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
            )
        return {"content": content, "refusal": None}


def _size(messages: Sequence[ChatMessage]) -> int:
    """The memory that they take, roughly."""
    return sum(len(str(message.content)) + 512 for message in messages)


def _tools(asked: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the policy may call."""
    if asked.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
