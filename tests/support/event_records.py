"""What a record of ``events.jsonl`` must have, by its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rayloop.core import events
from rayloop.core.events import Event
from rayloop.run.records.events import KINDS
from rayloop.run.records.jsonl import encode
from rayloop.run.records.metrics import validate as unknown_metrics

ENVELOPE = ("schema_version", "time", "event", "step")
"""What every record has besides the fields of its kind; ``step`` only while there is a driver."""


def validate(records: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """One sentence for each unknown kind, missing or unknown field, and value of another type in
    records of events.jsonl.
    """
    return tuple(problem for record in records for problem in _problems(record))


def _problems(record: Mapping[str, Any]) -> list[str]:
    kind = record["event"]
    fields = {name: value for name, value in record.items() if name not in ENVELOPE}
    if kind not in KINDS:
        return [f"{kind} is no event of rayloop/core/events.py or incidents.py"]
    if KINDS[kind] is events.Evaluated:
        return [
            f"{kind}: {name} is no metric of rayloop/run/records/metrics.yaml"
            for name in unknown_metrics(fields)
        ]
    try:
        _adapter(kind).validate_json(encode(fields), strict=True)
    except ValidationError as error:
        return [f"{kind}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    return []


@cache
def _adapter(kind: str) -> TypeAdapter[Event]:
    return TypeAdapter(KINDS[kind])
