"""Environments of NeMo Gym: its resources servers, over HTTP.

Tested with nemo-gym 0.7.0. A row is a row of its data sets. The episode asks ``/seed_session``, the
path of each tool that the policy calls, and ``/verify``, whose reward is the result.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import Field

from rayloop.core.failures import DataFailure, EnvironmentFailed, PolicyFailure
from rayloop.core.protocols import Observation, StepResult, Tool, ToolResult
from rayloop.core.types import Task
from rayloop.data.messages import messages, without_nulls
from rayloop.data.rows import parsed
from rayloop.envs.adapters.packages import LOCAL, reported, unanswered
from rayloop.envs.tools import ToolCalls

PARAMS = "responses_create_params"
"""The column with the conversation and the tools, as a request to OpenAI's Responses API."""
QUOTED_CHARACTERS = 500
"""Characters of a server's answer that a failure repeats."""


class NemoGymRows:
    """Reads rows of NeMo Gym's data sets.

    The conversation is ``responses_create_params.input``, where ``developer`` is the role
    ``system``. The other columns are for the verifier, which gets the whole row.
    """

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """Return the row as a task. Raises DataFailure."""
        # A column of a Parquet file has null keys, and may be text.
        params = without_nulls(_params(row, where))
        listed = params.get("input")
        if isinstance(listed, str):
            listed = [{"role": "user", "content": listed}]
        if not isinstance(listed, list) or not listed:
            raise DataFailure(where, f"{PARAMS}.input must be a text or a list of messages")
        conversation = []
        for item in listed:
            is_message = isinstance(item, Mapping) and item.get("type", "message") == "message"
            if not is_message:
                raise DataFailure(where, f"{PARAMS}.input must have messages only")
            role = item.get("role")
            role = "system" if role == "developer" else role
            conversation.append({"role": role, "content": item.get("content")})
        agent = row.get("agent_ref") or {}
        return Task(
            str(row.get("id") or Path(where).name),
            messages(conversation, [], where, root),
            {name: value for name, value in row.items() if name != PARAMS},
            str(agent.get("name") or ""),
            {**row, PARAMS: params},
        )


class NemoGym(ToolCalls):
    """One episode on a resources server, whose tools are those of the row.

    ``core/failures.yaml`` says which of its failures are the policy's. An answer that the server
    marks with ``mask_sample`` has no reward.
    """

    class Settings(ToolCalls.Settings):
        """Where the server is."""

        url: str = Field(pattern=r"^https?://")
        """The server's address, such as http://host:8000."""
        message_timeout: float = Field(45.0, gt=0)
        """Seconds for an answer of the server. Keep it below ``episode.step_timeout``."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._url = settings.url.rstrip("/")
        # No proxy reaches this machine's loopback.
        through_proxy = urlsplit(self._url).hostname not in LOCAL
        # It keeps the cookie by which the server knows the episode.
        self._client = httpx.Client(timeout=settings.message_timeout, trust_env=through_proxy)
        self._row: Mapping[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Return the row's tools, and the configured ones. Raises DataFailure."""
        offered = _params(task.extra, task.id).get("tools") or ()
        of_server = [_Tool(self, schema) for schema in offered if schema["type"] == "function"]
        return [*of_server, *super().tools_for(task)]

    def reset(self, task: Task) -> Observation:
        """Begin a session. Raises EnvironmentFailed, DataFailure."""
        first = super().reset(task)
        self._row = task.extra
        self._output = []
        self._checked("/seed_session", self._post("/seed_session", self._row))
        return first

    def step(self, text: str) -> StepResult:
        """Carry out the call as ``ToolCalls`` does. Raises EnvironmentFailed."""
        result = super().step(text)
        if result.done:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            message = {"type": "message", "id": "answer", "role": "assistant"}
            self._output.append({**message, "status": "completed", "content": content})
        return result

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool, and return what the server answers.

        Raises ToolError for an answer that the policy sees as an error, EnvironmentFailed.
        """
        call_id = f"call_{len(self._output)}"
        sent = {"name": name, "arguments": json.dumps(arguments), "call_id": call_id}
        self._output.append({"type": "function_call", **sent})
        answer = self._post(f"/{name}", arguments)
        received = {"call_id": call_id, "output": answer.text}
        self._output.append({"type": "function_call_output", **received})
        return self._checked(f"/{name}", answer, acted=True).text

    def evaluate(self) -> float:
        """Return the server's reward.

        Raises PolicyFailure for an answer that breaks the verifier, EnvironmentFailed.
        """
        answer = self._verify(self._output)
        if answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
            # An empty answer to the same row shows who broke it: it breaks a broken server too.
            self._checked("/verify", self._verify([]))
            answer = self._verify(self._output)
            if answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
                raise PolicyFailure(f"the answer breaks the verifier: {_quoted(answer)}")
        verdict = self._read(self._checked("/verify", answer))
        if verdict.get("mask_sample"):
            kind = str(verdict.get("failure_kind") or "other")
            why = f"NeMo Gym, {kind}: {verdict.get('failure_reason')}"
            raise reported("nemo_gym", kind, why, self._url, acted=False)
        return float(verdict["reward"])

    def close(self) -> None:
        """Close the connections."""
        super().close()
        self._client.close()

    def _verify(self, output: Sequence[Mapping[str, Any]]) -> httpx.Response:
        params = self._row[PARAMS]
        response = {
            "id": "resp_rayloop",
            "created_at": 0,
            "model": "policy",
            "object": "response",
            "output": output,
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": params.get("tools") or [],
        }
        return self._post("/verify", {**self._row, "response": response})

    def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """Send a request. Raises EnvironmentFailed when there is no answer."""
        # The client's own encoder raises on NaN, which a policy may write; a server refuses it.
        content = json.dumps(body, default=str)
        headers = {"Content-Type": "application/json"}
        try:
            return self._client.post(self._url + path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise unanswered(error, f"NeMo Gym, {path}", self._url) from error

    def _checked(self, path: str, answer: httpx.Response, acted: bool = False) -> httpx.Response:
        """Return the answer. Raises for a status that is not a success, as ``reported`` says."""
        if answer.is_success:
            return answer
        why = f"NeMo Gym, {path}: HTTP {answer.status_code}: {_quoted(answer)}"
        raise reported("nemo_gym", f"http_{answer.status_code}", why, self._url, acted=acted)

    def _read(self, answer: httpx.Response) -> Mapping[str, Any]:
        """Return the verifier's answer. Raises EnvironmentFailed for one without a reward."""
        try:
            verdict: Mapping[str, Any] = answer.json()
            float(verdict["reward"])
        except (ValueError, TypeError, KeyError) as error:
            why = f"NeMo Gym, /verify: an answer without a reward: {_quoted(answer)}"
            raise EnvironmentFailed(why, bug=True, server=self._url) from error
        return verdict


class _Tool:
    """A tool of the server, whose HTTP client has a deadline."""

    own_deadline = True

    def __init__(self, environment: NemoGym, schema: Mapping[str, Any]) -> None:
        self.name = schema["name"]
        self.description = schema.get("description") or self.name
        self.parameters = schema.get("parameters") or {}
        self._environment = environment

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Call it. Raises as ``NemoGym.call``."""
        return ToolResult(self._environment.call(self.name, arguments))


def _params(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    params = parsed(row.get(PARAMS))
    if not isinstance(params, Mapping):
        raise DataFailure(where, f"no column {PARAMS!r}: this is not a row of NeMo Gym")
    return params


def _quoted(answer: httpx.Response) -> str:
    return answer.text[:QUOTED_CHARACTERS]
