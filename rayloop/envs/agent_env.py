"""An agent of any kind, a program that calls an OpenAI client, as an environment.

See docs/policy_endpoint.md.
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
    OF_INFRASTRUCTURE,
    AgentFailed,
    Blame,
    Cause,
    EnvironmentFailed,
    EnvironmentHung,
    Raised,
    blame_of,
    cause_of,
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
READY_TIMEOUT_S = 60.0
"""Seconds in which the process that starts agents has imported its modules."""
FULL = (errno.EAGAIN, errno.ETOOMANYREFS)
"""The kernel's errors for a socket with too many requests, or too many descriptors, to be read."""
SEND_AGAIN_AFTER_S = 0.02
"""Seconds until a request is sent again that found the buffer full."""
SHOWN_CHARACTERS = 1500
"""Characters of an agent's output that a failure shows."""
UNREACHED = ("Network is unreachable", "Temporary failure in name resolution")
"""The messages of programs without a network."""
PACKAGES = {"browsergym": "browsergym-miniwob miniwob openai"}
"""The packages that pip installs for a module of another name."""


class AgentEnv:
    """Runs an agent for each episode, as a process that asks the policy over HTTP.

    It finds the address in ``OPENAI_BASE_URL`` and its key in ``OPENAI_API_KEY``.
    """

    agent_driven = True

    class Settings(SettingsModel):
        run: str | tuple[str, ...]
        """The agent: ``module:function``, ``file.py:function``, or a command as a list of words.

        The function may be a coroutine function. Its parameters, and words like ``{prompt}``, get
        the row's columns; a single parameter of another name gets the row.
        """
        python: str = ""
        """The Python that runs the function, if it is not this one.

        Name the Python of an environment with the agent's packages.
        """
        model: str = "policy"
        """The model's name that the agent sends (``OPENAI_MODEL``).

        Set it to the name that an agent has built in.
        """
        env: dict[str, str] = {}
        """Further variables of the agent.

        It inherits PATH, HOME and the like from the run, and no keys.
        """
        preload: tuple[str, ...] = ()
        """Modules that agents import slowly, such as ``openai`` (1 s).

        They are imported once, in a process from which agents are forked.
        """
        deadline: float = Field(600.0, gt=0)
        """Seconds of one agent.

        Beyond them the agent is ended, and the episode is played again or left out.
        """
        memory_mb: int = Field(4096, ge=64)
        """MiB of the agent and of all that it starts."""
        processes: int = Field(64, ge=1)
        """Processes of the agent at once."""
        reward: Literal["returned", "posted"] = "returned"
        """``returned``: what the function returns or the command reports; ``posted``: also by HTTP.

        They are sent to ``/v1/reward`` with the key that a parameter ``reward_key``, or a word
        ``{reward_key}``, gets: for commands. Any program with that key can pay.
        """
        alone: bool = True
        """Whether the agent gets its own user, process and IPC namespaces, where they work here.

        It then sees only its processes. Turn it off for an agent that must see others.
        """
        network: bool = False
        """Whether an agent that is alone has this machine's network.

        Without it, the agent reaches the policy and what it starts itself.
        """
        on_error: Literal["exclude"] | Annotated[float, Field(allow_inf_nan=False)] = 0.0
        """The result of an episode whose agent failed after an answer of the policy.

        It ended with an error, or passed its memory or its processes: most often the answer has a
        call that the agent cannot carry out. Errors of network, machine and missing packages, and
        refused requests, are always left out. exclude: all are, so the worst answers leave groups.
        """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = settings.model
        self.on_error = settings.on_error

    async def reset(self, task: Task) -> Observation:
        """Check that the agent can be loaded.

        Raises EnvironmentFailed. The messages are the row's, which the agent gets too.
        """
        if isinstance(self.settings.run, str):
            await self._run({}, {}, call=False)
        elif shutil.which(self.settings.run[0]) is None:
            raise EnvironmentFailed(
                f"with.run: the program {self.settings.run[0]!r} was not found", bug=True
            )
        return Observation(task.messages)

    async def run_agent(self, task: Task, address: Mapping[str, str]) -> float | None:
        """Run the agent to its end.

        Returns the number that its function returned, or that the command reported (``result`` at
        ``RESULT_VARIABLE``), None for any other value. Raises AgentFailed when it ended with an
        error, EnvironmentHung at the deadline, EnvironmentFailed at another limit.
        """
        return await self._run(_row(task), address, call=True)

    def close(self) -> None:
        """Nothing is left: ``run_agent`` ends the agent's processes, also when it is cancelled."""

    async def _run(
        self, row: Mapping[str, Any], address: Mapping[str, str], *, call: bool
    ) -> float | None:
        settings = self.settings
        python = settings.python or sys.executable
        pays = settings.reward == "posted"
        request = {
            "run": settings.run,
            "row": row,
            "address": {
                name: value for name, value in address.items() if name != "reward_key" or pays
            },
            "limits": {
                "seconds": settings.deadline,
                "memory_mb": settings.memory_mb,
                "processes": settings.processes,
            },
            "call": call,
            "alone": settings.alone,
            "network": settings.network,
            "variables": self._variables(address),
            "folder": os.getcwd(),
        }
        server = await in_thread(
            _fork_server, python, settings.preload, timeout=2 * READY_TIMEOUT_S
        )
        report = await server.host(request)
        if settings.alone and not report["alone"]:
            _warn_once()

        output = _last_output(report["output"], python)
        if report["late"]:
            raise EnvironmentHung(f"the agent was ended: {report['end']}{output}", True)
        if report["end"]:
            raise AgentFailed(f"the agent was ended: {report['end']}{output}")
        if report["code"]:
            cause = Cause.RAISED if report["broken"] else _cause(report)
            raise AgentFailed(
                f"the agent ended with exit code {report['code']}{output}",
                policys=cause is None,
                cause=cause,
                server=str(report["server"]),
            )
        result: float | None = report["result"]
        return result

    def _variables(self, address: Mapping[str, str]) -> dict[str, str]:
        openai = {
            "OPENAI_BASE_URL": address.get("base_url", ""),
            "OPENAI_API_KEY": address.get("api_key", ""),
        }
        local = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        return {
            **_inherited_variables(),
            **local,
            **openai,
            "OPENAI_MODEL": self.model,
            **self.settings.env,
        }


def _cause(report: Mapping[str, Any]) -> Cause | None:
    """Return the cause that an agent reported, else that of its exceptions, None: the policy.

    The policy, when it reported none: the policy may have written what an agent prints. A
    MemoryError comes from ``memory_mb``: a machine without memory kills.
    """
    try:
        if report["cause"] in OF_INFRASTRUCTURE:
            return Cause(report["cause"])
        errors = []
        for names, number in report["raised"]:
            errors.append(Raised([name for name in names if name != "MemoryError"], number))
        return None if blame_of(errors) is Blame.POLICY else cause_of(errors)
    except (TypeError, ValueError):
        # A command, or what a policy made an agent do, can report anything.
        return None


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "agents share this user's processes: no user namespaces, or no /proc in them, here"
        " (docs/security.md, Agents)"
    )


def _inherited_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED if name in os.environ}


class _ForkServer:
    """The process from which the agents of one Python are forked (agents/host.py).

    It ends with this process.
    """

    def __init__(self, python: str, preload: tuple[str, ...]) -> None:
        """Start it. Raises EnvironmentFailed."""
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Requests are sent from the event loop, which must not wait for this process.
        self._control.setblocking(False)
        with tempfile.TemporaryFile() as errors, server_end:
            try:
                process = subprocess.Popen(
                    [python, HOST, *preload],
                    stdin=server_end.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=_inherited_variables(),
                    start_new_session=True,
                )
            except OSError as error:
                raise EnvironmentFailed(
                    f"with.python: {python} cannot be started: {error}", bug=True
                ) from error
            assert process.stdout is not None
            answered = select.select([process.stdout], [], [], READY_TIMEOUT_S)[0]
            if not answered or not process.stdout.readline():
                process.kill()
                # A character of UTF-8 has at most four bytes.
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4 * SHOWN_CHARACTERS))
                tail = errors.read(4 * SHOWN_CHARACTERS).decode(errors="replace")
                output = _last_output(tail, python) or ": no answer"
                raise EnvironmentFailed(
                    f"with.python, with.preload: {python} did not start{output}", bug=True
                )
        self._process = process

    def alive(self) -> bool:
        """Return whether it runs."""
        return self._process.poll() is None

    async def host(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run an agent, and return how it ended. Ends the agent when this is cancelled.

        Raises EnvironmentFailed.
        """
        connection, server_end = socket.socketpair()
        try:
            # A socket without a name: an agent could find a name.
            with server_end:
                await self._send(server_end.fileno())
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=1 << 20)
        except OSError as error:
            connection.close()
            raise EnvironmentFailed(f"the process that starts agents ended: {error}") from error
        except BaseException:
            connection.close()
            raise
        try:
            writer.write(json.dumps(request, default=str).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
            if line:
                report: dict[str, Any] = json.loads(line)
                return report
        except ConnectionError as error:
            raise EnvironmentFailed(f"the process that runs the agent ended: {error}") from error
        finally:
            # The other side ends the agent when the connection closes, also after a cancellation.
            writer.close()
        raise EnvironmentFailed("the process that runs the agent ended without a word")

    async def _send(self, descriptor: int) -> None:
        """Give the process a socket.

        Raises EnvironmentFailed when it takes none within ``READY_TIMEOUT_S``, OSError when it has
        ended.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                socket.send_fds(self._control, [b"1"], [descriptor])
                return
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if time.monotonic() > deadline:
                    raise EnvironmentFailed(
                        f"the process that starts agents took no request for {READY_TIMEOUT_S:g} s"
                    ) from error
            # Many episodes that begin at once fill the buffer faster than that process forks.
            await asyncio.sleep(SEND_AGAIN_AFTER_S)


_fork_servers: dict[tuple[str, tuple[str, ...]], _ForkServer] = {}
_starting = threading.Lock()


def _fork_server(python: str, preload: tuple[str, ...]) -> _ForkServer:
    """Return the fork server of this Python; start it when it does not run."""
    with _starting:
        server = _fork_servers.get((python, preload))
        if server is None or not server.alive():
            server = _ForkServer(python, preload)
            _fork_servers[python, preload] = server
        return server


def _last_output(output: str, python: str) -> str:
    """Return the end of a program's output, and how to install what it lacks.

    Its last line comes first, since readers see one line of events.
    """
    *earlier, last = output.strip()[-SHOWN_CHARACTERS:].split("\n")
    match = re.search(r"No module named '(\w+)", last)
    if match:
        module = match[1]
        last += f": {python} -m pip install {PACKAGES.get(module, module)}"
    if any(message in output for message in UNREACHED):
        last += " (with.network: true gives an agent this machine's network)"
    return "\n".join([f": {last}", *earlier]) if last else ""


def _row(task: Task) -> dict[str, Any]:
    """Return the task for an agent: its columns, ``messages`` in OpenAI's form, and ``prompt``.

    ``prompt`` joins the texts of the last message.
    """
    messages = [
        {"role": message.role, "content": _content(message.parts)} for message in task.messages
    ]
    prompt = ""
    if task.messages:
        prompt = "".join(part for part in task.messages[-1].parts if isinstance(part, str))
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
