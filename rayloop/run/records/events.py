"""Where events are kept, and what a record must have. The kinds are the classes in rayloop/core/events.py and incidents.py."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rayloop.core import events, incidents
from rayloop.core.events import Event
from rayloop.run.records.jsonl import JsonLines, encode
from rayloop.run.records.metrics import validate as unknown_metrics

PARTS = {"What every run does": events, "Incidents": incidents}
KINDS: dict[str, type[Event]] = {
    value.kind: value
    for module in PARTS.values()
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Event) and value is not Event
}
ENVELOPE = ("schema_version", "time", "event", "step")
"""What every record has besides the fields of its kind; ``step`` only while there is a driver."""


class EventLog:
    """``events.jsonl``: append-only, one record per event (``JsonLines``)."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def append(self, event: Event, step: int | None = None) -> dict[str, Any]:
        """Write the event, or hold it while the storage refuses; returns its record, without schema version and time."""
        fields = event.record()
        record = {"event": fields.pop("event"), **({} if step is None else {"step": step}), **fields}
        self._lines.append(record)
        return record

    def beside(self, event: Event) -> None:
        """Write an event while another process writes them, if the storage takes it."""
        self._lines.beside(event.record())

    @property
    def trouble(self) -> OSError | None:
        """Why the last event is not on the disk; None when it is."""
        return self._lines.trouble

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._lines)

    def since(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Those from byte ``offset`` on, and where they end."""
        return self._lines.since(offset)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def validate(records: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """One sentence for each unknown kind, missing or unknown field, and value of another type in records of events.jsonl."""
    return tuple(problem for record in records for problem in _problems(record))


def _problems(record: Mapping[str, Any]) -> list[str]:
    kind = record["event"]
    fields = {name: value for name, value in record.items() if name not in ENVELOPE}
    if kind not in KINDS:
        return [f"{kind} is no event of rayloop/core/events.py or incidents.py"]
    if KINDS[kind] is events.Evaluated:
        return [f"{kind}: {name} is no metric of rayloop/run/records/metrics.py" for name in unknown_metrics(fields)]
    try:
        _adapter(kind).validate_json(encode(fields), strict=True)
    except ValidationError as error:
        return [f"{kind}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
    return []


@cache
def _adapter(kind: str) -> TypeAdapter[Event]:
    return TypeAdapter(KINDS[kind])
