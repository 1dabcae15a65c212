"""Chat completions by vLLM in this process, text only: a judge's engine.

It serves the folder's weights. The form is OpenAI's.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer

from rayloop.core.failures import WorkerLost
from rayloop.engines.generation.vllm_process import alive, common_arguments, output, prepare, start
from rayloop.engines.settings import VllmEngineSettings


class RequestRefused(ValueError):
    """A request that the model cannot answer.

    It is too long, or has an unknown option or a schema that cannot be followed.
    """


class TooLong(RequestRefused):
    """The prompt leaves no room for an answer."""


class VllmChat:
    """Loads the model when it is made, which takes minutes for a large one."""

    def __init__(
        self, model: str, settings: VllmEngineSettings, folder: str, name: str = ""
    ) -> None:
        """Start vLLM with the folder ``model``.

        ``name``: the name in answers; ``folder``: for temporary files, removed by the caller.
        """
        prepare(settings, folder)
        self._name = name or model
        self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._llm = start(_arguments(model, settings))
        self._limit: int = self._llm.model_config.max_model_len
        self._serial = itertools.count()

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a chat request.

        Raises RequestRefused, and WorkerLost when vLLM's processes are dead.
        """
        # A template over a long text takes milliseconds,
        # in which the loop must answer health checks.
        ids = await asyncio.to_thread(self._tokens, body["messages"])
        if len(ids) >= self._limit:
            raise TooLong(f"the prompt has {len(ids)} tokens, the limit is {self._limit - 1}")
        try:
            parameters = _parameters(body, self._limit - len(ids))
            number = f"chat-{next(self._serial)}"
            answer = await output(self._llm, {"prompt_token_ids": ids}, parameters, number)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        if answer.finish_reason not in ("stop", "length"):
            raise WorkerLost(f"vLLM ended a request: {answer.finish_reason}")
        return self._answer(ids, answer)

    def alive(self) -> None:
        """Raises WorkerLost when vLLM's processes are dead."""
        alive(self._llm)

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown(timeout=0)

    def _tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        texts = [
            {"role": message["role"], "content": _text(message["content"])} for message in messages
        ]
        ids: Any = self._tokenizer.apply_chat_template(
            texts, add_generation_prompt=True, return_dict=False
        )
        return list(ids)

    def _answer(self, ids: Sequence[int], output: Any) -> dict[str, Any]:
        tokens = len(output.token_ids)
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": tokens,
            "total_tokens": len(ids) + tokens,
        }
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": output.text},
            "finish_reason": output.finish_reason,
            "logprobs": {"content": _logprobs(output)} if output.logprobs else None,
        }
        return {
            "id": "chat",
            "object": "chat.completion",
            "created": 0,
            "model": self._name,
            "choices": [choice],
            "usage": usage,
        }


def _text(content: Any) -> str:
    """Return the text of a message. Raises RequestRefused for anything else."""
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise RequestRefused("this model reads text only")
    return "\n".join(part["text"] for part in content)


def _arguments(model: str, settings: VllmEngineSettings) -> dict[str, Any]:
    """Return arguments of ``AsyncEngineArgs``."""
    return {
        **common_arguments(model, settings),
        # Blanks between the tokens of a JSON object would be spent from a verdict's max_tokens.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **settings.extra,
    }


def _parameters(body: Mapping[str, Any], room: int) -> Any:
    """Return vLLM's sampling parameters; ``room`` is how many tokens fit behind the prompt.

    Raises ValueError.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    form: Mapping[str, Any] = body.get("response_format") or {"type": "text"}
    match form.get("type"):
        case "text":
            structure = None
        case "json_object":
            structure = StructuredOutputsParams(json_object=True)
        case "json_schema":
            structure = StructuredOutputsParams(json=_schema(form))
        case kind:
            raise RequestRefused(
                f"response_format: {kind!r} is not one of text, json_object, json_schema"
            )
    return SamplingParams(
        temperature=body.get("temperature", 1.0),
        top_p=body.get("top_p", 1.0),
        seed=body.get("seed"),
        stop=body.get("stop"),
        max_tokens=min(body.get("max_tokens", room), room),
        # 0 still returns the sampled token's log-prob; None returns none.
        logprobs=body.get("top_logprobs", 0) if body.get("logprobs") else None,
        structured_outputs=structure,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _schema(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a ``response_format``. Raises RequestRefused."""
    match form:
        case {"json_schema": {"schema": dict(schema)}}:
            return schema
    raise RequestRefused("response_format: json_schema needs {json_schema: {schema: {...}}}")


def _logprobs(output: Any) -> list[dict[str, Any]]:
    """Return OpenAI's ``logprobs.content``: each token of the answer with its alternatives."""
    content = []
    for token, options in zip(output.token_ids, output.logprobs, strict=True):
        entry: dict[str, Any] = _entry(options[token])
        entry["top_logprobs"] = [_entry(option) for option in options.values()]
        content.append(entry)
    return content


def _entry(option: Any) -> dict[str, Any]:
    return {"token": option.decoded_token or "", "logprob": option.logprob}
