"""Requests to servers with the OpenAI interface: deadlines, attempts, and status codes."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx

from rayloop.core.failures import ConfigError, DataFailure, WorkerLost

BUSY = frozenset({408, 409, 425, 429})
"""Status codes after which the same request may succeed, like those from 500."""
REFUSED = frozenset({400, 413, 422})
"""Status codes for a request with wrong content."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts that are never reached through a proxy."""
REQUEST_ATTEMPTS = 6
"""How often a server is asked that cannot be reached, is busy or fails.

With 1, 2, 4, 8, 16 seconds between, it has time to restart.
"""
ANSWER_TIMEOUT_S = 600.0
"""Seconds for one answer.

The caller bounds all attempts together (a sixth of ``environment.episode_timeout``).
"""
NONE: Mapping[str, str] = MappingProxyType({})


async def request(
    servers: Sequence[tuple[str, httpx.AsyncClient]], body: Any, key: str = "rollout.engine"
) -> tuple[str, Any]:
    """Return the address that answered and its JSON: the first that can be reached.

    GET when ``body`` is None. Raises WorkerLost when the attempts are spent, DataFailure or
    ConfigError, which names ``key``, when refused.
    """
    for attempt in range(REQUEST_ATTEMPTS):
        if attempt:
            await asyncio.sleep(2 ** (attempt - 1))
        for url, http in servers:
            try:
                response = await (http.get(url) if body is None else http.post(url, json=body))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                # Nothing was sent, so the next server can be asked at once.
                failure = f"{url}: {type(error).__name__}: {error}"
                continue
            except httpx.HTTPError as error:
                # The server may be at work on it: it gets time before a server is asked again.
                failure = f"{url}: {type(error).__name__}: {error}"
                break
            failure = f"{url}: HTTP {response.status_code}: {response.text[:200]}"
            if response.is_success:
                return url, _parsed(response)
            if response.status_code in REFUSED:
                raise DataFailure(url, failure)
            if response.status_code not in BUSY and response.status_code < 500:
                raise ConfigError(f"{key}: {failure}")
            break
    raise WorkerLost(f"the server failed {REQUEST_ATTEMPTS} times, last: {failure}")


async def served_model(url: str, key: str) -> str:
    """Return the name of the one model of the server at ``url``.

    Raises WorkerLost, and ConfigError, which names ``key``.
    """
    async with client(url) as http:
        _, models = await request([(f"{url}/models", http)], None, key)
    try:
        [name] = [model["id"] for model in models["data"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {url}/models does not name one model: {str(models)[:200]}"
        ) from error
    return str(name)


def client(url: str, headers: Mapping[str, str] = NONE) -> httpx.AsyncClient:
    """Return a client for the server at ``url``, past proxies when it is this machine."""
    # httpx allows 100 connections, and requests beyond them can time out while they wait for one.
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        trust_env=httpx.URL(url).host not in LOOPBACK,
        timeout=ANSWER_TIMEOUT_S,
        headers=headers,
        limits=limits,
    )


def _parsed(response: httpx.Response) -> Any:
    """Return the body as JSON; None when it is empty, as the answers of some calls are."""
    try:
        return response.json() if response.content else None
    except json.JSONDecodeError:
        return response.text
