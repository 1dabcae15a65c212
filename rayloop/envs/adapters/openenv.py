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
from rayloop.envs.adapters.packages import RewardedSteps, function, needs, picture, read_by

LOCAL = ("localhost", "127.0.0.1", "::1")
BYTES = 100 * 2**20
"""Of the largest answer."""
TOO_BIG = 1009
"""WebSocket's code for a message that is too big."""
REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of an action that the server does not accept."""


class OpenEnvSettings(SettingsModel):
    """Where the server is, and how its observations are shown."""

    url: str = Field(pattern=r"^(ws|http)s?://")
    """The server's address, such as http://host:8000; ``/ws`` is appended."""
    text: str = "text"
    """Key of the observation whose text is shown.

    Without it, the observation is shown as JSON, pictures left out.
    """
    image: str = ""
    """Key of the observation's picture: base64 of a PNG or JPEG (smallest), or lists, flat ones
    with ``<key>_shape``.
    """
    act: str = "rayloop.envs.adapters.openenv:json_action"
    """``module:function`` from the policy's text to the action, a dictionary.

    It raises ValueError for a text that is none.
    """
    result: Literal["sum", "last"] = "sum"
    """What ``evaluate`` returns: the sum of the rewards, or the last one."""
    message_timeout: float = Field(45.0, gt=0)
    """Seconds for an answer of the server. Keep it below ``episode.step_timeout``."""

    @model_validator(mode="after")
    def _there(self) -> Self:
        needs("websockets", "openenv")
        function(self.act)
        return self


class OpenEnv(RewardedSteps):
    """One session; the row's columns ``seed`` and ``episode_id`` are given to ``reset``.

    A server's error is the environment's failure, except for an action that it does not accept, or
    on which its environment raises.
    """

    Settings = OpenEnvSettings

    def __init__(self, settings: OpenEnvSettings) -> None:
        super().__init__(settings.result)
        self._settings = settings
        self._act = function(settings.act)
        self._session: Any = None
        self._open = ExitStack()

    def reset(self, task: Task) -> Observation:
        """Raises EnvironmentFailed."""
        from websockets.sync.client import connect

        s = self._settings
        address = f"ws{s.url.removeprefix('ws').removeprefix('http').rstrip('/')}/ws"
        # websockets obeys HTTPS_PROXY and the like, and no proxy reaches this machine's loopback.
        proxy = None if urlsplit(s.url).hostname in LOCAL else True
        try:
            connection = connect(
                address, open_timeout=s.message_timeout, max_size=BYTES, proxy=proxy
            )
            self._session = self._open.enter_context(
                connection
            )  # as all releases of websockets need it
        except Exception as error:
            raise EnvironmentFailed(
                f"OpenEnv at {s.url}: {type(error).__name__}: {error}"
            ) from error
        asked = {
            key: task.extra[key]
            for key in ("seed", "episode_id")
            if task.extra.get(key) is not None
        }
        said, _ = self._asked("reset", asked)
        return Observation((*task.messages, self._seen(said)))

    def step(self, text: str) -> StepResult:
        """Raises PolicyFailure for an action that the server's environment answers with an
        exception or with more than ``BYTES``, EnvironmentFailed for the rest.
        """
        try:
            action = read_by(self._act, text)
        except ValueError as error:
            return self._refused(str(error))
        said, refusal = self._asked("step", action)
        if refusal:
            return self._refused(refusal)
        reward = self._reward(said.get("reward") or 0.0)
        return StepResult(
            Observation((self._seen(said, acted=True),)), done=bool(said.get("done")), reward=reward
        )

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            with suppress(Exception):  # the server may have ended
                self._session.send(json.dumps({"type": "close"}))
        self._open.close()

    def _asked(self, op: str, data: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
        """What the server observed, and why it does not accept the action.

        Raises EnvironmentFailed.
        """
        from websockets.exceptions import ConnectionClosed

        acts = op == "step"
        try:
            with suppress(ConnectionClosed):  # what it said before it closed is still to be read
                self._session.send(json.dumps({"type": op, "data": data}))
            answer = json.loads(self._session.recv(timeout=self._settings.message_timeout))
            kind, said = answer["type"], answer["data"]
        except Exception as error:
            ended = error.sent if isinstance(error, ConnectionClosed) else None
            if acts and ended is not None and ended.code == TOO_BIG:
                raise PolicyFailure(
                    f"what the action led to has more than {BYTES} bytes"
                ) from error
            raise EnvironmentFailed(f"OpenEnv, {op}: {type(error).__name__}: {error}") from error
        if kind == "error":
            code, message = said.get("code", "UNKNOWN"), said.get("message", "")
            if code == "CAPACITY_REACHED":
                message += ". Raise the server's max_concurrent_envs, or lower environment.actors"
            if acts and code in REFUSED:
                return {}, _why(said)
            if acts and code == "EXECUTION_ERROR":
                raise PolicyFailure(f"OpenEnv: the action raised: {message}")
            raise EnvironmentFailed(f"OpenEnv, {op}: {code}: {message}")
        if kind != "observation" or not isinstance(said, dict):
            raise EnvironmentFailed(
                f"OpenEnv answered {op} with {kind!r}, which is no observation", bug=True
            )
        return said, ""

    def _seen(self, said: Mapping[str, Any], *, acted: bool = False) -> Message:
        """``acted``: what an action has led to; words stand for a picture of it that cannot be
        shown.
        """
        observed = said.get("observation", said)
        key, parts = self._settings.image, list[str | ImageSource]()
        if key and observed.get(key) is not None:
            try:
                seen = _picture(observed[key], observed.get(f"{key}_shape"))
                parts += pictures([seen]) if acted else [seen]
            except EnvironmentFailed:
                if not acted:
                    raise
                parts.append(NOT_SHOWN)
        if (text := observed.get(self._settings.text)) is not None:
            parts.append(str(text))
        else:
            rest = {
                name: value
                for name, value in observed.items()
                if name not in (key, f"{key}_shape", "metadata")
            }
            parts.append(json.dumps(rest))
        return self._shown(*parts)


def _why(said: Mapping[str, Any]) -> str:
    """Why the server refuses an action: its message, and each field of the action with what is
    wrong with it.
    """
    errors = said.get("errors")
    if not isinstance(errors, list):
        return str(said.get("message", ""))
    fields = [error for error in errors if isinstance(error, dict)]
    faults = [
        f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}" for error in fields
    ]
    return "; ".join([str(said.get("message", "")), *faults])


def json_action(text: str) -> dict[str, Any]:
    """The JSON object that the text is, or that stands between its first and last brace.

    Raises ValueError.
    """
    begin, end = text.find("{"), text.rfind("}")
    try:
        found = json.loads(text[begin : end + 1]) if 0 <= begin < end else None
    except RecursionError as error:
        raise ValueError("the action is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("the action is a JSON object")
    return found


def _picture(value: Any, shape: Any) -> ImageSource:
    """Raises EnvironmentFailed for what is none."""
    try:
        if isinstance(value, str):
            return ImageSource(
                data=base64.b64decode(value.partition("base64,")[2] or value, validate=True)
            )
        array = np.asarray(value)
        return picture(array.reshape(shape) if shape else array)
    except (ValueError, TypeError, binascii.Error) as error:
        raise EnvironmentFailed(f"the observation's picture: {error}", bug=True) from error
