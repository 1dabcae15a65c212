"""A real MCP server for tests of the adapter: ``python mcp_server.py``, over its standard input and
output, or on a PORT.
"""

from __future__ import annotations

import io
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from PIL import Image as Pictures

server = MCPServer("tests")


@server.tool()
def zoom(box: list[float], factor: float = 2.0) -> list:  # type: ignore[type-arg]
    """Looks closer at a box."""
    encoded = io.BytesIO()
    Pictures.new("RGB", (int(30 * factor), 20), (9, 9, 9)).save(encoded, "PNG")
    return [f"zoomed {box}", Image(data=encoded.getvalue(), format="png")]


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("boom")


@server.tool()
def rest() -> str:
    """Takes a minute."""
    time.sleep(60)
    return "rested"


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
