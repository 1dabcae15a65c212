"""Prometheus metrics that all applications share: requests, their time, and the work that is held."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rayloop.core.failures import InfrastructureFailure

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Overloaded(InfrastructureFailure):
    """The replica holds as much as ``limits.held`` allows."""


class RequestMetrics:
    """The metrics of one replica. ``prefix`` ("judge") begins every name; ``owner`` are labels of every series.

    ``held`` names what a replica holds ("items"), of which it accepts at most ``limit`` at once.
    """

    def __init__(self, prefix: str, owner: Mapping[str, str], held: str, limit: int) -> None:
        self.registry = CollectorRegistry()
        self._prefix, self._owner, self._what, self._limit, self._held = prefix, owner, held, limit, 0
        self._requests = self.made(Counter, "requests", "Requests by how they ended.", "route", "outcome")
        self._latency = self.made(Histogram, "latency_seconds", "From the parsed request to the answer.", "route", buckets=BUCKETS)
        self._in_flight = self.one(Gauge, "inflight", "Requests being answered.")
        self._queue = self.one(Gauge, "queue", f"{held.capitalize()} that are being answered or wait.")

    @contextmanager
    def request(self, route: str) -> Iterator[None]:
        """Count a request and its time; an exception's name is its outcome."""
        began, outcome = time.monotonic(), "ok"
        self._in_flight.inc()
        try:
            yield
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self._in_flight.dec()
            self._requests.labels(**self._owner, route=route, outcome=outcome).inc()
            self._latency.labels(**self._owner, route=route).observe(time.monotonic() - began)

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold the work of one request while the block runs. Raises Overloaded when it does not fit.

        A request that alone is larger than the limit is accepted while nothing else is held.
        """
        if self._held and self._held + count > self._limit:
            raise Overloaded(f"{self._held} {self._what} are held, limits.held is {self._limit}")
        self._add(count)
        try:
            yield
        finally:
            self._add(-count)

    def full(self) -> str:
        """Why no more work is accepted; "" while it is."""
        return f"{self._held} {self._what} are held, the limit is {self._limit}" if self._held >= self._limit else ""

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def made(self, kind: type[Any], name: str, about: str, *labels: str, **options: Any) -> Any:
        """A new metric with the owner's labels and ``labels``."""
        return kind(f"{self._prefix}_{name}", about, [*self._owner, *labels], registry=self.registry, **options)

    def one(self, kind: type[Any], name: str, about: str) -> Any:
        """A new metric with no labels but the owner's."""
        return self.made(kind, name, about).labels(**self._owner)

    def _add(self, count: int) -> None:
        self._held += count
        self._queue.set(self._held)
