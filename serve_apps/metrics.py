"""What the Prometheus metrics of all applications have in common: requests, their time, and what is held."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RequestMetrics:
    """One process's own. Names begin with ``prefix`` ("judge"); ``owner`` are labels of every series, such as the replica."""

    def __init__(self, prefix: str, owner: Mapping[str, str], held: str) -> None:
        """``held`` says what the gauge of what is being worked on counts."""
        self.registry = CollectorRegistry()
        self._prefix, self._owner = prefix, owner
        self._requests = self._made(Counter, "requests", "Requests by how they ended.", "route", "outcome")
        self._latency = self._made(Histogram, "latency_seconds", "From the parsed request to the answer.", "route", buckets=BUCKETS)
        self.in_flight: Gauge = self._one(Gauge, "inflight", "Requests being answered.")
        self.held: Gauge = self._one(Gauge, "queue", held)

    @contextmanager
    def request(self, route: str) -> Iterator[None]:
        """Count a request and its time; an exception's name is its outcome."""
        began, outcome = time.monotonic(), "ok"
        self.in_flight.inc()
        try:
            yield
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self.in_flight.dec()
            self._requests.labels(**self._owner, route=route, outcome=outcome).inc()
            self._latency.labels(**self._owner, route=route).observe(time.monotonic() - began)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self.registry)

    def _made(self, kind: type[Any], name: str, about: str, *labels: str, **options: Any) -> Any:
        return kind(f"{self._prefix}_{name}", about, [*self._owner, *labels], registry=self.registry, **options)

    def _one(self, kind: type[Any], name: str, about: str) -> Any:
        """With no labels but the owner's."""
        return self._made(kind, name, about).labels(**self._owner)
