"""Prometheus metrics of the judge's client, in the process's registry: there is one client per process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("judge_client_requests", "Requests to the judge by how they ended.", ["outcome"])
LATENCY = Histogram(
    "judge_client_latency_seconds", "One request to the judge, from sending to the parsed reply.",
    buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)  # fmt: skip
IN_FLIGHT = Gauge("judge_client_in_flight", "Requests being made.")
WAITING = Gauge("judge_client_waiting", "Distinct questions without a verdict yet.")
RETRIES = Counter("judge_client_retries", "Requests that will be made again, by cause.", ["reason"])
BREAKER = Gauge("judge_client_breaker_state", "0 closed, 1 half open (the canary is being asked), 2 open.")
CACHE_HITS = Counter("judge_client_cache_hits", "Verdicts that were known, or being asked for already.", ["kind"])
VERDICTS = Counter("judge_client_verdicts", "Verdicts received, by kind and by rules or model.", ["verdict", "decided_by"])
CANARY = Gauge("judge_client_canary_ok", "1 when the last canary was judged right, 0 when not.")
CHANGES = Counter("judge_client_fingerprint_changes", "How often the judge was another one than before.")
EXCLUDED = Counter("judge_excluded_samples", "Trajectories left without a reward by the judge's policy.", ["reason"])
DRIFT = Gauge("judge_client_drift", "Share of the drift subset's verdicts that differ from those at the start.")
