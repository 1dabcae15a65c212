"""The present state of a run's judge, for the console's page about it."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rayloop.core.failures import RayloopError
from rayloop.judge.api import JudgeVersion
from rayloop.judge.transport import ConnectionSettings, JudgeConnection
from rayloop.view.reader import Record

_CONNECT_TIMEOUT_S = 1.0
_ANSWER_TIMEOUT_S = 2.0
"""Seconds for each answer of a judge."""


async def judge_now(settings: Record) -> Record:
    """The present answers of the judge of these settings; empty without a judge.

    ``why`` it is not ready, ``version``, and ``figures`` of the judge and of the client that serves
    ``metrics_port``.
    """
    judge_settings = settings.get("judge")
    if not isinstance(judge_settings, Mapping):
        return {}
    keys = judge_settings.keys() & ConnectionSettings.model_fields.keys()
    limits = {key: judge_settings[key] for key in keys}
    limits |= {"connect_timeout": _CONNECT_TIMEOUT_S, "request_timeout": _ANSWER_TIMEOUT_S}
    present: Record = {"why": "", "figures": []}
    try:
        connection = JudgeConnection(ConnectionSettings.model_validate(limits))
    except (RayloopError, ValueError) as error:
        return {**present, "why": str(error)}
    try:
        present["version"] = JudgeVersion.model_validate_json(await connection.get("/version"))
        metrics = await connection.get("/metrics")
        present["figures"] = figures(metrics.decode(errors="replace"))
        port = settings.get("metrics_port")
        if port:
            present["figures"] += figures(await _client_metrics(port))
        # Last, since it raises for a judge that is not ready: version and figures are read by then.
        await connection.get("/readyz")
    except (RayloopError, ValueError, httpx.HTTPError) as error:
        present["why"] = str(error) or type(error).__name__
    finally:
        await connection.close()
    return present


async def _client_metrics(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=_ANSWER_TIMEOUT_S) as http:
        response = await http.get(f"http://127.0.0.1:{port}/metrics")
    return response.text


def calibrated(file: Path) -> Record:
    """The report of ``judge calibrate`` in a file; empty when it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return {}


def figures(text: str) -> list[tuple[str, str, float | None]]:
    """Meaning, labels and value of a judge's metrics in Prometheus' format.

    The value of a histogram is its mean.
    """
    rows: list[tuple[str, str, float | None]] = []
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("judge"):
            continue
        series: dict[str, dict[str, float]] = {}
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            series.setdefault(_labels(sample.labels), {})[suffix] = sample.value
        for labels, values in series.items():
            mean = values["_sum"] / values["_count"] if values.get("_count") else None
            value = values.get("_total", values.get("", mean))
            rows.append((family.documentation, labels, value))
    return rows


def _labels(labels: Mapping[str, str]) -> str:
    """The values of the labels that a reader needs."""
    return ", ".join(
        value for key, value in labels.items() if value and key not in ("replica", "le")
    )
