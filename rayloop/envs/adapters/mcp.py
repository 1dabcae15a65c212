"""Tools of MCP servers in a conversation, without episodes or rewards.

The package is the extra ``mcp`` (2.x).
"""

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any, Self

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import Blame, EnvironmentFailed, blame, cause_of, raised
from rayloop.core.protocols import Tool, ToolResult
from rayloop.core.types import ImageSource, Task
from rayloop.envs.adapters.packages import needs, reported
from rayloop.envs.tools import ToolCalls, ToolError

CLOSE_TIMEOUT_S = 10.0
"""Seconds for a server to end; its process is killed by the client after that."""
CONNECT_TIMEOUT_S = 30.0
"""Seconds to connect to a server over HTTP, as the client has it by default."""
READ_TIMEOUT_S = 300.0
"""Seconds for an answer over HTTP, as the client has it by default."""


class McpServer(SettingsModel):
    """A program that is started for each episode, or a server that runs already."""

    command: str = ""
    """The program of a server that uses its standard input and output.

    It has the rights of the run.
    """
    args: tuple[str, ...] = ()
    """Arguments of ``command``; a path is on the machine that plays the episode."""
    env: dict[str, str] = {}
    """Environment variables of ``command``; it inherits only a few harmless ones."""
    url: str = ""
    """Address of a server that runs already, such as http://host:8000/mcp.

    All episodes then share it.
    """
    headers: dict[str, str] = {}
    """Headers of each request to ``url``.

    ``$NAME`` in a value is a variable of the machine that plays the episode, so that the
    configuration has no key: ``{Authorization: "Bearer $GITHUB_TOKEN"}``.
    """
    only: tuple[str, ...] = ()
    """Names of its tools that the policy may call. Empty: all of them."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        if self.headers and not self.url:
            raise ValueError("headers are of a url; a command has env")
        return self

    @property
    def shown(self) -> str:
        """Return the program with its arguments, or the address, for messages."""
        return self.url or " ".join([self.command, *self.args])

    @property
    def named(self) -> str:
        """Return the program, or the address, for metrics."""
        return self.url or self.command

    @property
    def hint(self) -> str:
        """Return what to do where it does not start."""
        if self.command:
            return "Run it by hand: its own errors are in this process's log"
        return (
            "The address is that of streamable HTTP, often /mcp; the older transport (SSE) is not"
            " supported"
        )


class McpTools(ToolCalls):
    """``ToolCalls`` with tools of MCP servers.

    The policy sees errors that a server reports; a lost one fails the environment.
    """

    class Settings(ToolCalls.Settings):
        """Which servers there are."""

        servers: tuple[McpServer, ...] = Field((), min_length=1)
        """The servers whose tools are offered.

        ``[{command: python, args: [server.py]}]`` or ``[{url: http://host:8000/mcp}]``.
        """
        start_timeout: float = Field(30.0, gt=0)
        """Seconds for a server to start and list its tools.

        Keep it below ``episode.step_timeout``.
        """

        @model_validator(mode="after")
        def _check_installed(self) -> Self:
            needs("mcp", "mcp")
            return self

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._mcp = settings
        self._open = ExitStack()

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Start the servers, and return their tools.

        Raises EnvironmentFailed when one does not start or lists two tools of one name.
        """
        from anyio.from_thread import start_blocking_portal

        try:
            portal = self._open.enter_context(start_blocking_portal())
            # The stack unwinds backwards: first servers end, then calls that wait are cancelled,
            # then the portal ends.
            self._open.callback(portal.call, portal.stop, True)
            servers = portal.wrap_async_context_manager(_offered(self._mcp))
            offered = self._open.enter_context(servers)
        except EnvironmentFailed:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"MCP: {type(error).__name__}: {_first(error)}") from error
        tools: list[Tool] = [
            _Tool(portal, client, tool, server) for client, tool, server in offered
        ]
        tools += super().tools_for(task)
        names = [tool.name for tool in tools]
        duplicates = {name for name in names if names.count(name) > 1}
        if duplicates:
            raise EnvironmentFailed(
                f"several tools are called {', '.join(sorted(duplicates))}: choose with `only`"
            )
        return tools

    def close(self) -> None:
        """End the servers that were started."""
        super().close()
        self._open.close()


Offered = tuple[Any, Any, McpServer]
"""The client of a server, one of its tools, and the server."""


@asynccontextmanager
async def _offered(settings: McpTools.Settings) -> AsyncIterator[list[Offered]]:
    """Yield the tools of the servers. Raises EnvironmentFailed, which names the server."""
    clients = AsyncExitStack()
    tools = list[Offered]()
    deadline = asyncio.get_running_loop().time() + settings.start_timeout
    try:
        for server in settings.servers:
            try:
                async with asyncio.timeout_at(deadline):
                    tools += await _listed(server, clients)
            except Exception as error:
                reason = f"{_kind(error)}: {_first(error)}"
                raise EnvironmentFailed(
                    f"MCP: {reason}, of the server {server.shown}. {server.hint}",
                    cause=cause_of(raised(error)),
                    server=server.named,
                ) from error
        yield tools
    finally:
        # It raises when a server has ended.
        with suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await clients.aclose()


async def _listed(server: McpServer, clients: AsyncExitStack) -> list[Offered]:
    """Start the server, and return its tools.

    Raises ValueError for an unknown name in ``only``, and what the client raises.
    """
    from mcp import Client, StdioServerParameters

    if server.headers:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: os.path.expandvars(value) for name, value in server.headers.items()}
        timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S)
        http_client = await clients.enter_async_context(
            httpx2.AsyncClient(headers=headers, timeout=timeout)
        )
        transport: Any = streamable_http_client(server.url, http_client=http_client)
    else:
        transport = server.url or StdioServerParameters(
            command=server.command, args=list(server.args), env=server.env or None
        )
    client = await clients.enter_async_context(Client(transport))
    tools = (await client.list_tools()).tools
    names = {tool.name for tool in tools}
    unknown = set(server.only) - names
    if unknown:
        raise ValueError(
            f"the server has no tool {', '.join(sorted(unknown))}, but {', '.join(sorted(names))}"
        )
    if server.only:
        tools = [tool for tool in tools if tool.name in server.only]
    return [(client, tool, server) for tool in tools]


class _Tool:
    """One tool of a server."""

    def __init__(self, portal: Any, client: Any, tool: Any, server: McpServer) -> None:
        self.name = tool.name
        self.description = tool.description or tool.name
        self.parameters = tool.input_schema
        self._portal = portal
        self._client = client
        self._server = server

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Call the tool.

        Raises ToolError for an error that the server reports, EnvironmentFailed when the server is
        lost.
        """
        try:
            result = self._portal.call(self._client.call_tool, self.name, arguments)
        except Exception as error:
            raise self._classified(error) from error
        texts = list[str]()
        images = list[ImageSource]()
        for part in result.content:
            text_or_image = _text_or_image(part)
            if isinstance(text_or_image, ImageSource):
                images.append(text_or_image)
            else:
                texts.append(text_or_image)
        if not result.content and result.structured_content is not None:
            texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        if result.is_error:
            why = "\n".join(texts) or f"{self.name} failed"
            raise reported("mcp", "is_error", why, self._server.named)
        return ToolResult("\n".join(texts), tuple(images))

    def _classified(self, error: Exception) -> Exception:
        """Return the exception for an error of the client.

        The server answered with the error, sent an invalid result, or gave no answer.
        """
        reason = f"{_kind(error)}: {_first(error)}"
        why = f"MCP tool {self.name} of the server {self._server.shown}: {reason}"
        code = getattr(error, "code", None)
        if isinstance(code, int):
            classified = reported("mcp", str(code), why, self._server.named)
            return ToolError(_first(error)) if isinstance(classified, ToolError) else classified
        if blame(error) is Blame.POLICY:
            return ToolError(_first(error))
        return EnvironmentFailed(why, cause=cause_of(raised(error)), server=self._server.named)


def _text_or_image(part: Any) -> str | ImageSource:
    """Return a part of a result as the policy sees it; words where it cannot be shown."""
    match part.type:
        case "text":
            return str(part.text)
        case "image":
            return _image(part.data)
        case "resource_link":
            return f"({part.name}: {part.uri})"
        case "resource" if hasattr(part.resource, "text"):
            return str(part.resource.text)
        case "resource" if (part.resource.mime_type or "").startswith("image/"):
            return _image(part.resource.blob)
        case "resource":
            return f"({part.resource.uri}: cannot be shown)"
        case other:
            return f"({other}: cannot be shown)"


def _image(encoded: str) -> ImageSource:
    """Return a picture, also a broken one: ``ToolCalls`` says which cannot be shown."""
    try:
        return ImageSource(data=base64.b64decode(encoded))
    except ValueError:
        return ImageSource(data=b"")


def _inner(error: BaseException) -> BaseException:
    """Return the first error of a group; another error itself."""
    # The task groups of anyio raise a group even for a single error.
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _kind(error: BaseException) -> str:
    return type(_inner(error)).__name__


def _first(error: BaseException) -> str:
    """Return the first line of an error, of the first one in a group."""
    inner = _inner(error)
    return (str(inner).strip() or type(inner).__name__).splitlines()[0]
