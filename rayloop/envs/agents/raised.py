"""What is reported of an exception that ends an agent. It runs in the agent's Python."""

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

CHAIN_LENGTH = 8
"""Exceptions, each the cause of the one before, that are reported."""
SHOWN_BASES = 12
"""Classes of an exception that are reported."""
NAME_CHARACTERS = 80
"""Characters of a class's name that are reported."""


def report(error: BaseException) -> dict[str, Any]:
    """Return what is reported: the exceptions (``raised``), the ``cause``, and the ``server``.

    An exception says its cause (a value of ``Cause``) and the server that failed by its attributes
    ``rayloop_cause`` and ``rayloop_server``.
    """
    return {
        "raised": _exception_chain(error),
        "cause": getattr(error, "rayloop_cause", ""),
        "server": getattr(error, "rayloop_server", _server(error)),
    }


def _server(error: BaseException) -> str:
    """Return where the request went that failed: httpx, requests and openai name it."""
    link: Any = error
    for _ in range(CHAIN_LENGTH):
        with suppress(Exception):
            parts = urlsplit(str(link.request.url))
            return f"{parts.scheme}://{parts.netloc}"
        link = link and (link.__cause__ or link.__context__)
    return ""


def _exception_chain(error: BaseException) -> list[tuple[list[str], Any]]:
    """Return the names of classes and bases, and the ``errno``, of an exception and its causes."""
    chain: list[tuple[list[str], Any]] = []
    cause: Any = error
    while cause is not None and len(chain) < CHAIN_LENGTH:
        kinds = [kind.__name__[:NAME_CHARACTERS] for kind in type(cause).__mro__[:SHOWN_BASES]]
        number = cause.errno if isinstance(cause, OSError) else None
        chain.append((kinds, number if isinstance(number, int) else None))
        members = getattr(cause, "exceptions", None)  # of an exception group
        if isinstance(members, tuple) and members and isinstance(members[0], BaseException):
            cause = members[0]
        elif cause.__cause__ or cause.__suppress_context__:
            cause = cause.__cause__
        else:
            cause = cause.__context__
    return chain
