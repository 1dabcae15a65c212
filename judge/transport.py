"""HTTP requests to the judge.

The address and key, time limits, the meaning of answers, and the client's Prometheus metrics.
"""

import asyncio
import email.utils
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prometheus_client import Counter, Gauge, Histogram
from pydantic import Field, field_validator

from rayloop.config.settings import Component, SettingsModel
from rayloop.core.failures import InfrastructureFailure, RayloopError
from rayloop.core.threads import in_thread
from rayloop.judge.api import RESULT, JudgeItem, JudgeRequest, JudgeUnscored, NoVerdict, Result
from rayloop.judge.discovery import READ_TIMEOUT_S, Address, Find, checked_url, key_of

REQUESTS = Counter("judge_client_requests", "Requests to the judge by their outcome.", ["outcome"])
LATENCY = Histogram(
    "judge_client_latency_seconds",
    "One request to the judge, from sending to the parsed reply.",
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
IN_FLIGHT = Gauge("judge_client_in_flight", "Requests being made.")
WAITING = Gauge("judge_client_waiting", "Distinct questions without a verdict yet.")
RETRIES = Counter("judge_client_retries", "Requests that will be made again, by cause.", ["reason"])
BREAKER = Gauge(
    "judge_client_breaker_state", "0 closed, 1 half open (the canary is being asked), 2 open."
)
CACHE_HITS = Counter(
    "judge_client_cache_hits", "Verdicts that were known, or being asked for already.", ["kind"]
)
VERDICTS = Counter(
    "judge_client_verdicts",
    "Verdicts received, by kind and by rules or model.",
    ["verdict", "decided_by"],
)
CANARY = Gauge("judge_client_canary_ok", "1 when the last canary was judged right, 0 when not.")
CHANGES = Counter(
    "judge_client_fingerprint_changes", "How often the judge was another one than before."
)
EXCLUDED = Counter(
    "judge_excluded_samples",
    "Trajectories left without a reward by the judge's policy.",
    ["reason"],
)
DRIFT = Gauge(
    "judge_client_drift",
    "Share of the drift subset's verdicts that differ from those at the start.",
)


MAX_RETRY_AFTER_S = 5.0
"""The most seconds of ``Retry-After`` that are honoured: the judge may be well much earlier."""
RETRIED_STATUSES = (404, 408, 425, 429)
"""Statuses below 500 that are retried.

Ray Serve answers 404 until the application exists.
"""


class ConnectionSettings(SettingsModel):
    """The judge's address and key, and the time limits of one request in seconds."""

    url: str = "auto"
    """``http://host:port`` of the judge, or ``auto``: ``discovery`` finds it."""
    key_file: str = ""
    """File (mode 0600) with the bearer key.

    For ``auto`` the judge's own entry names it unless this is set.
    """
    discovery: Component = Component(use="rayloop.judge.discovery:FileDiscovery")
    """Finds the judge when ``url`` is ``auto``.

    An instance is awaited and returns a ``rayloop.judge.discovery.Address``.
    """
    connect_timeout: float = Field(5.0, gt=0)
    """Seconds for the connection alone. Raise it for a judge that is far away."""
    read_timeout: float = Field(120.0, gt=0)
    """Seconds without a byte of the answer. A batch waits in the queue of a busy judge."""
    request_timeout: float = Field(180.0, gt=0)
    """Seconds for a complete request, including discovery."""

    @field_validator("url")
    @classmethod
    def _url(cls, text: str) -> str:
        return text if text == "auto" else checked_url(text)


class Transient(InfrastructureFailure):
    """A request that failed and may be retried.

    ``reason`` labels the metric; ``retry_after`` is in seconds.
    """

    def __init__(self, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after

    @property
    def perhaps_an_item(self) -> bool:
        """Whether a single item can be the cause.

        It can when the judge answered with an error, with nonsense, or not for this item.
        """
        return self.reason in ("unavailable", "bad_body") or self.reason.startswith("5")


class JudgeRefused(InfrastructureFailure):
    """A request that would fail again.

    It has no key or a wrong one, is malformed or too large, or the server is not a judge.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = f"refused_{status}"


class JudgeConnection:
    """Requests to one judge, from one event loop.

    Proxies of the environment are not used: the judge is our own process.
    """

    def __init__(self, limits: ConnectionSettings, find: Find | None = None) -> None:
        self.limits = limits
        # "auto" until the judge is found.
        self.url = limits.url.rstrip("/")
        self._find: Find | None = None
        if limits.url == "auto":
            self._find = find or limits.discovery.build()
        self._address: Address | None = None
        self._headers: Mapping[str, str] = {}
        self._http = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(limits.read_timeout, connect=limits.connect_timeout, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def judge(self, items: Sequence[JudgeItem]) -> list[Result]:
        """One result for each item.

        Raises Transient, JudgeRefused; ConfigError for a key file that is unusable.
        """
        start = time.perf_counter()
        with IN_FLIGHT.track_inprogress():
            try:
                request = JudgeRequest(items=tuple(items)).model_dump_json()
                body = await self._request("POST", "/v1/judge", request)
                results = _results(body, len(items), self.url)
            except (Transient, JudgeRefused) as error:
                REQUESTS.labels(error.reason).inc()
                # The judge may have moved, or have another key.
                self._address = None
                raise
        REQUESTS.labels("ok").inc()
        LATENCY.observe(time.perf_counter() - start)
        return results

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises like ``judge``."""
        return await self._request("GET", path, None)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _request(self, method: str, path: str, content: str | None) -> bytes:
        try:
            async with asyncio.timeout(self.limits.request_timeout):
                response = await self._answer(method, path, content)
        except RayloopError:
            raise
        except (httpx.TimeoutException, TimeoutError) as error:
            raise Transient(
                "timeout", f"{self.url}: no answer in time ({type(error).__name__})"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = "connect" if isinstance(error, httpx.ConnectError) else "transport"
            raise Transient(reason, f"{self.url}: {type(error).__name__}: {error}") from error
        # Whatever the error is, the policy's answer is not the cause.
        except Exception as error:
            raise Transient("unexpected", f"{self.url}: {type(error).__name__}: {error}") from error

        if response.is_success:
            return response.content
        status = response.status_code
        message = f"{self.url}{path}: HTTP {status}: {response.text[:1000]}"
        if status in RETRIED_STATUSES or status >= 500:
            pause = retry_after(response.headers.get("retry-after", ""))
            raise Transient(str(status), message, pause)
        raise JudgeRefused(status, message)

    async def _answer(self, method: str, path: str, content: str | None) -> httpx.Response:
        """The judge's answer.

        After a 401 or 403 the address and the key are read again, and tried if they changed: the
        judge may be new.
        """
        await self._locate()
        response = await self._send(method, path, content)
        if response.status_code not in (401, 403):
            return response
        refused = (self.url, self._headers)
        self._address = None
        await self._locate()
        if (self.url, self._headers) == refused:
            return response
        return await self._send(method, path, content)

    async def _send(self, method: str, path: str, content: str | None) -> httpx.Response:
        headers = {"content-type": "application/json", **self._headers}
        return await self._http.request(method, self.url + path, content=content, headers=headers)

    async def _locate(self) -> None:
        """Find address and key, or neither: nothing is sent to a judge whose key cannot be read."""
        if self._address is not None:
            return
        try:
            address = Address(url=self.url) if self._find is None else await self._find()
            key = await in_thread(key_of, address, self.limits.key_file, timeout=READ_TIMEOUT_S)
        except InfrastructureFailure as error:
            raise Transient("discovery", str(error)) from error
        self._address = address
        self.url = address.url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}


def retry_after(header: str) -> float:
    """The seconds from now in a ``Retry-After`` header, which is a number or a date.

    0 without a header, at most MAX_RETRY_AFTER_S.
    """
    if not header:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return 0.0
    # ``float`` reads "nan" too.
    if math.isnan(seconds):
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def _results(body: bytes, count: int, url: str) -> list[Result]:
    """The results of a body; one without a verdict is unscored as invalid.

    Raises Transient when the body is not a response.
    """
    try:
        raw = json.loads(body)["results"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise Transient(
            "bad_body", f"{url}: the answer is not a judge's response: {body[:120]!r}"
        ) from error
    if not isinstance(raw, list) or len(raw) != count:
        raise Transient("bad_body", f"{url}: expected {count} results: {body[:120]!r}")
    return [_result(element) for element in raw]


def _result(raw: Any) -> Result:
    try:
        # As JSON: in strict mode pydantic takes no texts for enums from Python's own values.
        return RESULT.validate_json(json.dumps(raw), strict=True)
    # Pydantic's ValidationError is a ValueError.
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).splitlines()[1:3])
        reason = f"no verdict ({problem}): {str(raw)[:200]}"
        return JudgeUnscored(kind=NoVerdict.INVALID, reason=reason[:1024])
