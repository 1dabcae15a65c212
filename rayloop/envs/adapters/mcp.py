"""Tools of MCP servers in a conversation, without episodes or rewards. The package is the extra ``mcp`` (2.x)."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import InfrastructureFailure
from rayloop.core.protocols import Tool, ToolResult
from rayloop.core.types import ImageSource, Task
from rayloop.envs.adapters.packages import needs
from rayloop.envs.tools import ToolCalls, ToolError

ENDING = 10.0
"""Seconds for a server to end; its process is killed by the client after that."""


class McpServer(SettingsModel):
    """A program that is started for each episode, or a server that is there already."""

    command: str = ""
    """The program of a server that speaks over its standard input and output; it has no more rights than the run, and no fewer."""
    args: tuple[str, ...] = ()
    """What ``command`` is called with; a path in it is one of the machine that plays the episode."""
    env: dict[str, str] = {}
    """Environment variables of ``command``; it inherits only a few harmless ones."""
    url: str = ""
    """Address of a server that is there already, such as http://host:8000/mcp. All episodes then share it."""
    only: tuple[str, ...] = ()
    """Names of its tools that the policy may call. Empty: all of them."""

    @model_validator(mode="after")
    def _one(self) -> McpServer:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        return self


class McpTools(ToolCalls):
    """``ToolCalls`` with the tools of MCP servers. The policy sees errors that a server reports; a lost server fails the
    environment."""

    class Settings(ToolCalls.Settings):
        """Which servers there are."""

        servers: tuple[McpServer, ...] = Field((), min_length=1)
        """``[{command: python, args: [server.py]}]`` or ``[{url: http://host:8000/mcp}]``: whose tools are offered."""
        start_timeout: float = Field(30.0, gt=0)
        """Seconds for a server to start and list its tools. Keep it below ``episode.reset_timeout``."""

        @model_validator(mode="after")
        def _there(self) -> McpTools.Settings:
            needs("mcp", "mcp")
            return self

    def __init__(self, settings: McpTools.Settings) -> None:
        super().__init__(settings)
        self._mcp = settings
        self._connection: _Connection | None = None

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Starts the servers. Raises InfrastructureFailure when one does not start or lists two tools of one name."""
        self._connection = _Connection(self._mcp.servers)
        found = [*self._connection.open(self._mcp.start_timeout), *super().tools_for(task)]
        names = [tool.name for tool in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise InfrastructureFailure(f"several tools are called {', '.join(sorted(twice))}: choose with `only`")
        return found

    def close(self) -> None:
        """End the servers that were started."""
        super().close()
        if self._connection is not None:
            self._connection.close()


class _Connection:
    """Clients of the servers, on an event loop in a thread of its own: the tools of one episode are called from many threads."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._servers = servers
        self._loop = asyncio.new_event_loop()
        self._ready: Future[list[Tool]] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mcp")

    def open(self, timeout: float) -> list[Tool]:
        """Raises InfrastructureFailure."""
        self._thread.start()
        try:
            return self._ready.result(timeout)
        except Exception as error:
            self.close()
            raise InfrastructureFailure(f"MCP: {type(error).__name__}: {_first(error)}") from error

    def call(self, client: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        """What the server answers. Raises InfrastructureFailure when it is gone."""
        try:
            return asyncio.run_coroutine_threadsafe(client.call_tool(name, dict(arguments)), self._loop).result()
        except Exception as error:
            raise InfrastructureFailure(f"MCP tool {name}: {type(error).__name__}: {_first(error)}") from error

    def close(self) -> None:
        """End the servers that were started."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(ENDING)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        """Clients are left by the task that entered them, which is this one."""
        from mcp import Client, StdioServerParameters

        async with AsyncExitStack() as open_:
            tools: list[Tool] = []
            for server in self._servers:
                started = StdioServerParameters(command=server.command, args=list(server.args), env=server.env or None)
                client = await open_.enter_async_context(Client(server.url or started))
                listed = (await client.list_tools()).tools
                known = {tool.name for tool in listed}
                if unknown := set(server.only) - known:
                    raise ValueError(f"the server has no tool {', '.join(sorted(unknown))}, but {', '.join(sorted(known))}")
                tools += [_Tool(self, client, tool) for tool in listed if not server.only or tool.name in server.only]
            self._ready.set_result(tools)
            await self._end.wait()


class _Tool:
    """One tool of a server."""

    def __init__(self, connection: _Connection, client: Any, tool: Any) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description or tool.name, tool.input_schema
        self._connection, self._client = connection, client

    def __call__(self, **arguments: Any) -> ToolResult:
        """Raises ToolError for what the server reports as the call's error."""
        result = self._connection.call(self._client, self.name, arguments)
        texts = [part.text for part in result.content if part.type == "text"]
        if result.is_error:
            raise ToolError("\n".join(texts) or f"{self.name} failed")
        others = sorted({part.type for part in result.content} - {"text", "image"})
        texts += [f"({', '.join(others)}: cannot be shown)"] if others else []
        images = [ImageSource(data=base64.b64decode(part.data)) for part in result.content if part.type == "image"]
        return ToolResult("\n".join(texts), tuple(images))


def _first(error: BaseException) -> str:
    """Of a group of errors the first one, in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]
