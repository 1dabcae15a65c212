"""An agent of any make as an environment: a program that calls an OpenAI client leads the episode
(docs/policy_endpoint.md).
"""

import asyncio
import errno
import functools
import json
import logging
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import (
    AgentFailed,
    Blame,
    EnvironmentFailed,
    EnvironmentHung,
    Raised,
    blame_of,
)
from rayloop.core.protocols import Observation
from rayloop.core.threads import in_thread
from rayloop.core.types import ImageSource, Task
from rayloop.data.images import data_url, probe
from rayloop.envs.agents import host

logger = logging.getLogger(__name__)
HOST = host.__file__
PASSED = (
    "PATH",
    "HOME",
    "USER",
    "SHELL",
    "TZ",
    "LANG",
    "TERM",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "http_proxy",
    "https_proxy",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "TMPDIR",
)
"""Variables of the run that an agent has too: none of them is a key."""
READY = 60.0
"""Seconds in which the process that starts agents has imported what it must."""
FULL = (errno.EAGAIN, errno.ETOOMANYREFS)
"""What the kernel says of a socket that holds too many requests, or too many descriptors, which
nobody has read yet.
"""
AGAIN = 0.02
"""Seconds until a request is sent again that found the buffer full."""
SHOWN = 1500
"""Characters of an agent's output that a failure shows."""
UNREACHED = ("Network is unreachable", "Temporary failure in name resolution")
"""What programs without a network say."""
PACKAGES = {"browsergym": "browsergym-miniwob miniwob openai"}
"""What pip installs for a module of another name."""


class Harness:
    """Runs an agent for each episode, as a process that asks the policy at ``OPENAI_BASE_URL`` with
    ``OPENAI_API_KEY``.
    """

    leads = True

    class Settings(SettingsModel):
        run: str | tuple[str, ...]
        """``module:function`` or ``file.py:function``, plain or a coroutine function; or a command
        as a list of words. Parameters of the function, and words like ``{prompt}``, get the row's
        columns; a single parameter of another name gets the row.
        """
        python: str = ""
        """The Python that runs the function, when not this one: of an environment with the agent's
        packages.
        """
        model: str = "policy"
        """The model's name that the agent sends (``OPENAI_MODEL``).

        Set it to the name that an agent has built in.
        """
        env: dict[str, str] = {}
        """Further variables of the agent.

        Of the run's own it has PATH, HOME and the like, and no keys.
        """
        preload: tuple[str, ...] = ()
        """Modules that agents import slowly, such as ``openai`` (1 s): imported once, in a process
        from which agents are forked.
        """
        deadline: float = Field(600.0, gt=0)
        """Seconds of one agent; beyond it the agent is ended, and the episode is played again or
        left out.
        """
        memory_mb: int = Field(4096, ge=64)
        """MiB of the agent and of all that it starts."""
        processes: int = Field(64, ge=1)
        """Processes of the agent at once."""
        reward: Literal["returned", "posted"] = "returned"
        """``returned``: what the function returns.

        ``posted``: also what is sent to ``/v1/reward`` with the key that a parameter
        ``reward_key``, or a word ``{reward_key}``, gets: for commands. Whatever that key reaches
        can pay.
        """
        alone: bool = True
        """Whether the agent has user, process and IPC namespaces of its own, where they work here:
        it then sees none but its own processes. Off for an agent that must see others.
        """
        network: bool = False
        """Whether an agent that is alone has this machine's network.

        Without, it reaches the policy and what it starts itself.
        """
        on_error: Literal["exclude"] | Annotated[float, Field(allow_inf_nan=False)] = 0.0
        """The result of an episode whose agent, after an answer of the policy, ended with an error,
        or passed its memory or its processes: most often the answer has a call that the agent
        cannot carry out. Errors of network, machine and packages that are missing, and refused
        requests, are left out whatever this says. exclude: all are, so the worst answers leave
        groups.
        """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.model, self.on_error = settings, settings.model, settings.on_error

    async def reset(self, task: Task) -> Observation:
        """Check that the agent can be loaded.

        Raises EnvironmentFailed. The messages are the row's, which the agent gets too.
        """
        if isinstance(self.settings.run, str):
            await self._run({}, {}, call=False)
        elif shutil.which(self.settings.run[0]) is None:
            raise EnvironmentFailed(
                f"with.run: there is no program {self.settings.run[0]!r}", bug=True
            )
        return Observation(task.messages)

    async def lead(self, task: Task, address: Mapping[str, str]) -> float | None:
        """Run the agent to its end.

        Returns the number that its function returned, None for anything else. Raises AgentFailed
        when it ended with an error, EnvironmentHung at the deadline, EnvironmentFailed at another
        limit.
        """
        return await self._run(_row(task), address, call=True)

    def close(self) -> None:
        """Nothing is left: ``lead`` ends the agent's processes, also when it is cancelled."""

    async def _run(
        self, row: Mapping[str, Any], address: Mapping[str, str], *, call: bool
    ) -> float | None:
        s = self.settings
        limits = {"seconds": s.deadline, "memory_mb": s.memory_mb, "processes": s.processes}
        opens = {
            name: value
            for name, value in address.items()
            if name != "reward_key" or s.reward == "posted"
        }
        asked = {
            "run": s.run,
            "row": row,
            "address": opens,
            "limits": limits,
            "call": call,
            "alone": s.alone,
        }
        asked["network"] = s.network
        asked |= {"variables": self._variables(address), "folder": os.getcwd()}

        server = await in_thread(
            _fork_server, s.python or sys.executable, s.preload, timeout=2 * READY
        )
        found = await server.host(asked)
        if s.alone and not found["alone"]:
            _warn()

        said = _said(found["output"], s.python or sys.executable)
        if found["late"]:
            raise EnvironmentHung(f"the agent was ended: {found['end']}{said}", True)
        if found["end"]:
            raise AgentFailed(f"the agent was ended: {found['end']}{said}", bug=True)
        if found["code"]:
            why = f"the agent ended with exit code {found['code']}{said}"
            raise AgentFailed(
                why, bug=True, policys=not found["broken"] and self._blame(found) is Blame.POLICY
            )
        result: float | None = found["result"]
        return result

    def _blame(self, found: Mapping[str, Any]) -> Blame:
        """Who is to blame for an agent's error: by the exceptions of its function, or by the name
        that a program's last line begins with, as that of a traceback does. A MemoryError comes
        from ``memory_mb``: a machine without memory kills.
        """
        chain = found["raised"]
        # The policy may have written a function's last line, and its exceptions are known without
        # it.
        if not isinstance(self.settings.run, str):
            named = re.match(r"(?:\w+\.)*(\w+)", found["output"].strip().rpartition("\n")[2])
            chain = [([named[1]], None)] if named else []
        return blame_of(
            [
                Raised([kind for kind in kinds if kind != "MemoryError"], number)
                for kinds, number in chain
            ]
        )

    def _variables(self, address: Mapping[str, str]) -> dict[str, str]:
        openai = {
            "OPENAI_BASE_URL": address.get("base_url", ""),
            "OPENAI_API_KEY": address.get("api_key", ""),
        }
        local = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        return {**_passed(), **local, **openai, "OPENAI_MODEL": self.model, **self.settings.env}


@functools.cache
def _warn() -> None:
    logger.warning(
        "agents share this user's processes: no user namespaces, or no /proc in them, here"
        " (docs/security.md, Agents)"
    )


def _passed() -> dict[str, str]:
    return {name: value for name in PASSED if (value := os.environ.get(name)) is not None}


class _ForkServer:
    """The process from which the agents of one Python are forked (agents/host.py); it ends with
    this one.
    """

    def __init__(self, python: str, preload: tuple[str, ...]) -> None:
        """Start it. Raises EnvironmentFailed."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Requests are sent from the event loop, which must not wait for this process.
        self._control.setblocking(False)
        line, variables = [python, HOST, *preload], _passed()
        with tempfile.TemporaryFile() as errors, theirs:
            try:
                process = subprocess.Popen(
                    line,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=variables,
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentFailed(
                    f"with.python: {python} cannot be started: {error}", bug=True
                ) from error
            assert process.stdout is not None
            if not (
                select.select([process.stdout], [], [], READY)[0] and process.stdout.readline()
            ):
                process.kill()
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4 * SHOWN))
                said = (
                    _said(errors.read(4 * SHOWN).decode(errors="replace"), python) or ": no answer"
                )
                raise EnvironmentFailed(
                    f"with.python, with.preload: {python} did not start{said}", bug=True
                )
        self._process = process

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    async def host(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """How an agent ended. Raises EnvironmentFailed. Ends the agent when it is cancelled."""
        connection, theirs = socket.socketpair()
        try:
            with theirs:  # no name leads to that process, which an agent could find
                await self._send(theirs.fileno())
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 20)
        except OSError as error:
            connection.close()
            raise EnvironmentFailed(f"the process that starts agents is gone: {error}") from error
        except BaseException:
            connection.close()
            raise
        try:
            writer.write(json.dumps(asked, default=str).encode() + b"\n")
            await writer.drain()
            if line := await reader.readline():
                found: dict[str, Any] = json.loads(line)
                return found
        except ConnectionError as error:
            raise EnvironmentFailed(f"the process that runs the agent ended: {error}") from error
        finally:
            # The other side ends the agent when the connection closes, also after a cancellation.
            writer.close()
        raise EnvironmentFailed("the process that runs the agent ended without a word")

    async def _send(self, descriptor: int) -> None:
        """Give the process a socket.

        Raises EnvironmentFailed when it takes none within ``READY``, OSError when it has ended.
        """
        until = time.monotonic() + READY
        while True:
            try:
                socket.send_fds(self._control, [b"1"], [descriptor])
                return
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if time.monotonic() > until:
                    raise EnvironmentFailed(
                        f"the process that starts agents took no request for {READY:g} s"
                    ) from error
            # Many episodes that begin at once fill the buffer faster than that process forks.
            await asyncio.sleep(AGAIN)


_fork_servers: dict[tuple[str, tuple[str, ...]], _ForkServer] = {}
_starting = threading.Lock()


def _fork_server(python: str, preload: tuple[str, ...]) -> _ForkServer:
    """The one of this Python, started where there is none."""
    with _starting:
        found = _fork_servers.get((python, preload))
        if found is None or not found.alive():
            found = _fork_servers[python, preload] = _ForkServer(python, preload)
        return found


def _said(output: str, python: str) -> str:
    """The end of a program's output, its last line first since people see one line of events, and
    how to install what it lacks.
    """
    *earlier, last = output.strip()[-SHOWN:].split("\n")
    if lacking := re.search(r"No module named '(\w+)", last):
        last += f": {python} -m pip install {PACKAGES.get(lacking[1], lacking[1])}"
    if any(sign in output for sign in UNREACHED):
        last += " (with.network: true gives an agent this machine's network)"
    return "\n".join([f": {last}", *earlier]) if last else ""


def _row(task: Task) -> dict[str, Any]:
    """The task for an agent: its columns, ``messages`` in OpenAI's form, and ``prompt``, the texts
    of the last one.
    """
    messages = [
        {"role": message.role, "content": _content(message.parts)} for message in task.messages
    ]
    prompt = (
        "".join(part for part in task.messages[-1].parts if isinstance(part, str))
        if task.messages
        else ""
    )
    return {
        **task.extra,
        "id": task.id,
        "messages": messages,
        "prompt": prompt,
        "ground_truth": task.ground_truth,
    }


def _content(parts: tuple[str | ImageSource, ...]) -> Any:
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [
        {"type": "text", "text": part} if isinstance(part, str) else _image(part) for part in parts
    ]


def _image(source: ImageSource) -> dict[str, Any]:
    data, _, _ = probe(source)
    return {"type": "image_url", "image_url": {"url": data_url(data)}}
