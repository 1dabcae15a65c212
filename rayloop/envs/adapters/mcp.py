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
from rayloop.core.failures import Blame, InfrastructureFailure, blame
from rayloop.core.protocols import Tool, ToolResult
from rayloop.core.types import ImageSource, Task
from rayloop.envs.adapters.packages import needs
from rayloop.envs.tools import ToolCalls, ToolError

ENDING = 10.0
"""Seconds for a server to end; its process is killed by the client after that."""
CONNECTING, READING = 30.0, 300.0
"""Seconds of a server's HTTP, as the client's own."""


class McpServer(SettingsModel):
    """A program that is started for each episode, or a server that is there already."""

    command: str = ""
    """The program of a server that speaks over its standard input and output; it has no more rights
    than the run, and no fewer.
    """
    args: tuple[str, ...] = ()
    """What ``command`` is called with; a path in it is one of the machine that plays the episode.
    """
    env: dict[str, str] = {}
    """Environment variables of ``command``; it inherits only a few harmless ones."""
    url: str = ""
    """Address of a server that is there already, such as http://host:8000/mcp.

    All episodes then share it.
    """
    headers: dict[str, str] = {}
    """Headers of each request to ``url``.

    ``$NAME`` in a value is a variable of the machine that plays the episode, so that no key stands
    here: ``{Authorization: "Bearer $GITHUB_TOKEN"}``.
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
        """For people: the program with its arguments, or the address."""
        return self.url or " ".join([self.command, *self.args])

    @property
    def hint(self) -> str:
        """What to do where it does not start."""
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
        """``[{command: python, args: [server.py]}]`` or ``[{url: http://host:8000/mcp}]``: whose
        tools are offered.
        """
        start_timeout: float = Field(30.0, gt=0)
        """Seconds for a server to start and list its tools.

        Keep it below ``episode.step_timeout``.
        """

        @model_validator(mode="after")
        def _there(self) -> Self:
            needs("mcp", "mcp")
            return self

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._mcp, self._open = settings, ExitStack()

    def tools_for(self, task: Task) -> Sequence[Tool]:
        """Starts the servers.

        Raises InfrastructureFailure when one does not start or lists two tools of one name.
        """
        from anyio.from_thread import start_blocking_portal

        try:
            portal = self._open.enter_context(start_blocking_portal())
            # The stack unwinds backwards: first servers end, then calls that wait, then the portal.
            self._open.callback(portal.call, portal.stop, True)  # calls that wait are cancelled
            offered = self._open.enter_context(
                portal.wrap_async_context_manager(_offered(self._mcp))
            )
        except InfrastructureFailure:
            raise
        except Exception as error:
            raise InfrastructureFailure(f"MCP: {type(error).__name__}: {_first(error)}") from error
        found = [*(_Tool(portal, *one) for one in offered), *super().tools_for(task)]
        names = [tool.name for tool in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise InfrastructureFailure(
                f"several tools are called {', '.join(sorted(twice))}: choose with `only`"
            )
        return found

    def close(self) -> None:
        """End the servers that were started."""
        super().close()
        self._open.close()


Offered = tuple[Any, Any, str]
"""The client of a server, one of its tools, and the server for people."""


@asynccontextmanager
async def _offered(settings: McpTools.Settings) -> AsyncIterator[list[Offered]]:
    """Tools of the servers. Raises InfrastructureFailure, which names the server."""
    open_, found = AsyncExitStack(), list[Offered]()
    until = asyncio.get_running_loop().time() + settings.start_timeout
    try:
        for server in settings.servers:
            try:
                async with asyncio.timeout_at(until):
                    found += await _listed(server, open_)
            except Exception as error:
                why = f"{_kind(error)}: {_first(error)}"
                raise InfrastructureFailure(
                    f"MCP: {why}, of the server {server.shown}. {server.hint}"
                ) from error
        yield found
    finally:
        with suppress(Exception):  # a server may have ended
            async with asyncio.timeout(ENDING):
                await open_.aclose()


async def _listed(server: McpServer, open_: AsyncExitStack) -> list[Offered]:
    """Start the server.

    Raises ValueError for an unknown name in ``only``, and what the client raises.
    """
    from mcp import Client, StdioServerParameters

    if server.headers:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {name: os.path.expandvars(value) for name, value in server.headers.items()}
        patience = httpx2.Timeout(CONNECTING, read=READING)
        web = await open_.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=patience))
        transport: Any = streamable_http_client(server.url, http_client=web)
    else:
        started = StdioServerParameters(
            command=server.command, args=list(server.args), env=server.env or None
        )
        transport = server.url or started
    client = await open_.enter_async_context(Client(transport))
    listed = (await client.list_tools()).tools
    known = {tool.name for tool in listed}
    if unknown := set(server.only) - known:
        raise ValueError(
            f"the server has no tool {', '.join(sorted(unknown))}, but {', '.join(sorted(known))}"
        )
    return [
        (client, tool, server.shown)
        for tool in listed
        if not server.only or tool.name in server.only
    ]


class _Tool:
    """One tool of a server."""

    def __init__(self, portal: Any, client: Any, tool: Any, server: str) -> None:
        self.name, self.description, self.parameters = (
            tool.name,
            tool.description or tool.name,
            tool.input_schema,
        )
        self._portal, self._client, self._server = portal, client, server

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Raises ToolError for what the server reports as the call's error, InfrastructureFailure
        when the server is lost.
        """
        try:
            result = self._portal.call(self._client.call_tool, self.name, arguments)
        except Exception as error:
            if _answered(error):
                raise ToolError(_first(error)) from error
            why = f"{_kind(error)}: {_first(error)}"
            raise InfrastructureFailure(
                f"MCP tool {self.name} of the server {self._server}: {why}"
            ) from error
        texts, images = list[str](), list[ImageSource]()
        for part in result.content:
            shown = _shown(part)
            if isinstance(shown, ImageSource):
                images.append(shown)
            else:
                texts.append(shown)
        if not result.content and result.structured_content is not None:
            texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        if result.is_error:
            raise ToolError("\n".join(texts) or f"{self.name} failed")
        return ToolResult("\n".join(texts), tuple(images))


def _shown(part: Any) -> str | ImageSource:
    """A part of a result as the policy sees it; words where it cannot be shown."""
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
    """A picture, broken ones too: ``ToolCalls`` says which cannot be shown."""
    try:
        return ImageSource(data=base64.b64decode(encoded))
    except ValueError:
        return ImageSource(data=b"")


OF_THE_CONNECTION = frozenset({-32000, -32001, -32600, -32601, -32700})
"""Codes of JSON-RPC and MCP that do not speak of a call's arguments: the connection is closed, no
answer in time, and requests that no server takes, as after it has forgotten the session.
"""


def _answered(error: Exception) -> bool:
    """Whether the server answered this call with an error, or with what is no result."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        return code not in OF_THE_CONNECTION
    return blame(error) is Blame.POLICY


def _inner(error: BaseException) -> BaseException:
    """The first error of a group; another error itself."""
    # The task groups of anyio raise a group even for a single error.
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _kind(error: BaseException) -> str:
    return type(_inner(error)).__name__


def _first(error: BaseException) -> str:
    """Of a group of errors the first one, in a line."""
    inner = _inner(error)
    return (str(inner).strip() or type(inner).__name__).splitlines()[0]
