"""Tools of MCP servers in a conversation, without episodes or rewards. The package is the extra ``mcp`` (2.x)."""

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any, Self

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
    def _one(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        return self


class McpTools(ToolCalls):
    """``ToolCalls`` with tools of MCP servers. The policy sees errors that a server reports; a lost one fails the environment."""

    class Settings(ToolCalls.Settings):
        """Which servers there are."""

        servers: tuple[McpServer, ...] = Field((), min_length=1)
        """``[{command: python, args: [server.py]}]`` or ``[{url: http://host:8000/mcp}]``: whose tools are offered."""
        start_timeout: float = Field(30.0, gt=0)
        """Seconds for a server to start and list its tools. Keep it below ``episode.step_timeout``."""

        @model_validator(mode="after")
        def _there(self) -> Self:
            needs("mcp", "mcp")
            return self

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._mcp, self._open = settings, ExitStack()

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Starts the servers. Raises InfrastructureFailure when one does not start or lists two tools of one name."""
        from anyio.from_thread import start_blocking_portal

        try:
            portal = self._open.enter_context(start_blocking_portal())
            self._open.callback(portal.call, portal.stop, True)  # calls that wait are cancelled
            offered = self._open.enter_context(portal.wrap_async_context_manager(_offered(self._mcp)))
        except Exception as error:
            raise InfrastructureFailure(f"MCP: {type(error).__name__}: {_first(error)}") from error
        found = [*(_Tool(portal, client, tool) for client, tool in offered), *super().tools_for(task)]
        names = [tool.name for tool in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise InfrastructureFailure(f"several tools are called {', '.join(sorted(twice))}: choose with `only`")
        return found

    def close(self) -> None:
        """End the servers that were started."""
        super().close()
        self._open.close()


@asynccontextmanager
async def _offered(settings: McpTools.Settings) -> AsyncIterator[list[tuple[Any, Any]]]:
    """Clients of the servers, each with a tool. Raises TimeoutError and what the clients raise."""
    from mcp import Client, StdioServerParameters

    open_, found = AsyncExitStack(), []
    try:
        async with asyncio.timeout(settings.start_timeout):
            for server in settings.servers:
                started = StdioServerParameters(command=server.command, args=list(server.args), env=server.env or None)
                client = await open_.enter_async_context(Client(server.url or started))
                listed = (await client.list_tools()).tools
                known = {tool.name for tool in listed}
                if unknown := set(server.only) - known:
                    raise ValueError(f"the server has no tool {', '.join(sorted(unknown))}, but {', '.join(sorted(known))}")
                found += [(client, tool) for tool in listed if not server.only or tool.name in server.only]
        yield found
    finally:
        with suppress(Exception):  # a server may be gone
            async with asyncio.timeout(ENDING):
                await open_.aclose()


class _Tool:
    """One tool of a server."""

    def __init__(self, portal: Any, client: Any, tool: Any) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description or tool.name, tool.input_schema
        self._portal, self._client = portal, client

    def __call__(self, **arguments: Any) -> ToolResult:
        """Raises ToolError for what the server reports as the call's error, InfrastructureFailure when it is gone."""
        try:
            result = self._portal.call(self._client.call_tool, self.name, arguments)
        except Exception as error:
            raise InfrastructureFailure(f"MCP tool {self.name}: {type(error).__name__}: {_first(error)}") from error
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
