"""An MCP server whose tools have the worst names of arguments, return every kind of part, and
raise: ``python hostile_mcp.py``.
"""

import base64

WRONG_CHECKSUM = base64.b64encode(
    base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )[:-9]
    + b"123456789"
).decode()


def serve() -> None:
    """Over the standard input and output."""
    from mcp.server.mcpserver import MCPServer
    from mcp_types import (
        AudioContent,
        BlobResourceContents,
        CallToolResult,
        EmbeddedResource,
        ImageContent,
        ResourceLink,
        TextResourceContents,
    )

    server = MCPServer("hostile")

    @server.tool()
    def parts() -> CallToolResult:
        """Every kind of part, and pictures that are none."""
        text = TextResourceContents(uri="repo://a.py", text="print(1)")
        return CallToolResult(
            content=[
                EmbeddedResource(resource=text),
                ResourceLink(name="manual", uri="https://example.org/manual"),
                ImageContent(data="%%%", mime_type="image/png"),
                ImageContent(data=WRONG_CHECKSUM, mime_type="image/png"),
                AudioContent(data="", mime_type="audio/wav"),
                EmbeddedResource(resource=BlobResourceContents(uri="file:///b", blob="AAAA")),
                EmbeddedResource(
                    resource=BlobResourceContents(
                        uri="file:///c.png", blob="AAAA", mime_type="image/png"
                    )
                ),
            ]
        )

    @server.tool()
    def named(
        self: int, cls: str = "", function: float | None = None, timeout: list[int] | None = None
    ) -> str:
        """Has parameters that Python's own calls have, too."""
        return f"{self} {cls} {function} {timeout}"

    @server.tool()
    def raises(kind: str) -> str:
        """Raises on what it is given."""
        raise {"value": ValueError, "key": KeyError, "file": FileNotFoundError}[kind](kind)

    server.run()


if __name__ == "__main__":
    serve()
