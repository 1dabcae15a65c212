"""Environments that an OpenEnv server plays, over its WebSocket.

The package is ``websockets``, the extra ``openenv``. Uses ``reset``, ``step`` and ``close`` of
openenv 0.10; a connection is a session. The result comes from the rewards.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import numpy as np
from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import EnvironmentFailed, PolicyFailure
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import NOT_SHOWN, pictures
from rayloop.envs.adapters.packages import (
    LOCAL,
    RewardedSteps,
    function,
    needs,
    picture,
    read_by,
    reported,
    unanswered,
)
from rayloop.envs.tools import ToolError

MAX_ANSWER_BYTES = 100 * 2**20
"""Bytes of the largest answer."""
TOO_BIG = 1009
"""WebSocket's code for a message that is too big."""


class OpenEnvSettings(SettingsModel):
    """Where the server is, and how its observations are shown."""

    url: str = Field(pattern=r"^(ws|http)s?://")
    """The server's address, such as http://host:8000; ``/ws`` is appended."""
    text: str = "text"
    """Key of the observation whose text is shown.

    Without it, the observation is shown as JSON, pictures left out.
    """
    image: str = ""
    """Key of the observation's picture.

    It is base64 of a PNG or JPEG (smallest), or lists, flat ones with ``<key>_shape``.
    """
    act: str = "rayloop.envs.adapters.openenv:json_action"
    """``module:function`` from the policy's text to the action, a dictionary.

    It raises ValueError for a text without an action.
    """
    result: Literal["sum", "last"] = "sum"
    """What ``evaluate`` returns: the sum of the rewards, or the last one."""
    message_timeout: float = Field(45.0, gt=0)
    """Seconds for an answer of the server. Keep it below ``episode.step_timeout``."""

    @model_validator(mode="after")
    def _check_installed(self) -> Self:
        needs("websockets", "openenv")
        function(self.act)
        return self


class OpenEnv(RewardedSteps):
    """One session; the row's columns ``seed`` and ``episode_id`` are given to ``reset``.

    ``core/failures.yaml`` says which of a server's errors are the policy's.
    """

    Settings = OpenEnvSettings

    def __init__(self, settings: OpenEnvSettings) -> None:
        super().__init__(settings.result)
        self._settings = settings
        self._act = function(settings.act)
        self._session: Any = None
        self._open = ExitStack()

    def reset(self, task: Task) -> Observation:
        """Open a session, and start its episode. Raises EnvironmentFailed."""
        from websockets.sync.client import connect

        settings = self._settings
        address = settings.url.removeprefix("ws").removeprefix("http").rstrip("/")
        # websockets obeys HTTPS_PROXY and the like, and no proxy reaches this machine's loopback.
        proxy = None if urlsplit(settings.url).hostname in LOCAL else True
        try:
            connection = connect(
                f"ws{address}/ws",
                open_timeout=settings.message_timeout,
                max_size=MAX_ANSWER_BYTES,
                proxy=proxy,
            )
            # Some releases of websockets return a context manager instead of a connection.
            self._session = self._open.enter_context(connection)
        except Exception as error:
            raise unanswered(error, f"OpenEnv at {settings.url}", settings.url) from error
        columns = {key: task.extra.get(key) for key in ("seed", "episode_id")}
        data = self._ask(
            "reset", {key: value for key, value in columns.items() if value is not None}
        )
        return Observation((*task.messages, self._seen(data)))

    def step(self, text: str) -> StepResult:
        """Take an action.

        Raises PolicyFailure for an action that the server's environment answers with an exception
        or with more than ``MAX_ANSWER_BYTES``, EnvironmentFailed for other errors.
        """
        try:
            action = read_by(self._act, text)
        except ValueError as error:
            return self._refused(str(error))
        try:
            data = self._ask("step", action)
        except ToolError as error:
            return self._refused(str(error))
        reward = self._reward(data.get("reward") or 0.0)
        message = self._seen(data, acted=True)
        return StepResult(Observation((message,)), done=bool(data.get("done")), reward=reward)

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            with suppress(Exception):  # the server may have ended
                self._session.send(json.dumps({"type": "close"}))
        self._open.close()

    def _ask(self, op: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the server's observation.

        Raises EnvironmentFailed, and for a step ToolError or PolicyFailure.
        """
        from websockets.exceptions import ConnectionClosed

        acts = op == "step"
        try:
            # What it sent before it closed the connection can still be read.
            with suppress(ConnectionClosed):
                self._session.send(json.dumps({"type": op, "data": arguments}))
            answer = json.loads(self._session.recv(timeout=self._settings.message_timeout))
            kind = answer["type"]
            data = answer["data"]
        except Exception as error:
            close = error.sent if isinstance(error, ConnectionClosed) else None
            if acts and close is not None and close.code == TOO_BIG:
                raise PolicyFailure(
                    f"what the action led to has more than {MAX_ANSWER_BYTES} bytes"
                ) from error
            raise unanswered(error, f"OpenEnv, {op}", self._settings.url) from error
        if kind == "error":
            raise self._reported(op, data)
        if kind != "observation" or not isinstance(data, dict):
            raise EnvironmentFailed(
                f"OpenEnv answered {op} with {kind!r}, which is not an observation",
                bug=True,
                server=self._settings.url,
            )
        return data

    def _reported(self, op: str, data: Mapping[str, Any]) -> Exception:
        """Return the exception for an error of the server."""
        code = data.get("code", "UNKNOWN")
        reason = _reason(data)
        why = f"OpenEnv, {op}: {code}: {reason}"
        if code == "CAPACITY_REACHED":
            why += ". Raise the server's max_concurrent_envs, or lower environment.actors"
        error = reported("openenv", code, why, self._settings.url, acted=op == "step")
        if isinstance(error, ToolError):
            return ToolError(reason)
        if isinstance(error, PolicyFailure):
            return PolicyFailure(f"OpenEnv: the action raised: {reason}")
        return error

    def _seen(self, data: Mapping[str, Any], *, acted: bool = False) -> Message:
        """Return the observation as a message.

        ``acted``: after an action; words then stand for a picture that cannot be shown.
        """
        observation = data.get("observation", data)
        key = self._settings.image
        parts = list[str | ImageSource]()
        if key and observation.get(key) is not None:
            try:
                image = _picture(observation[key], observation.get(f"{key}_shape"))
                parts += pictures([image]) if acted else [image]
            except EnvironmentFailed:
                if not acted:
                    raise
                parts.append(NOT_SHOWN)
        text = observation.get(self._settings.text)
        if text is not None:
            parts.append(str(text))
        else:
            hidden = (key, f"{key}_shape", "metadata")
            fields = {name: value for name, value in observation.items() if name not in hidden}
            parts.append(json.dumps(fields))
        return self._shown(*parts)


def _reason(data: Mapping[str, Any]) -> str:
    """Return the server's message, and each field of the action with its errors."""
    message = str(data.get("message", ""))
    errors = data.get("errors")
    if not isinstance(errors, list):
        return message
    reasons = [message]
    for error in errors:
        if isinstance(error, dict):
            field = ".".join(map(str, error.get("loc", ())))
            reasons.append(f"{field}: {error.get('msg', '')}")
    return "; ".join(reasons)


def json_action(text: str) -> dict[str, Any]:
    """Return the JSON object that the text is, or that stands between its first and last brace.

    Raises ValueError.
    """
    start = text.find("{")
    end = text.rfind("}")
    try:
        action = json.loads(text[start : end + 1]) if 0 <= start < end else None
    except RecursionError as error:
        raise ValueError("the action is nested too deeply") from error
    if not isinstance(action, dict):
        raise ValueError("the action is a JSON object")
    return action


def _picture(value: Any, shape: Any) -> ImageSource:
    """Return a picture. Raises EnvironmentFailed for a value that is not one."""
    try:
        if isinstance(value, str):
            encoded = value.partition("base64,")[2] or value
            return ImageSource(data=base64.b64decode(encoded, validate=True))
        array = np.asarray(value)
        return picture(array.reshape(shape) if shape else array)
    except (ValueError, TypeError, binascii.Error) as error:
        raise EnvironmentFailed(f"the observation's picture: {error}", bug=True) from error
