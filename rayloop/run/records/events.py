"""The table of events: where they are kept, what a record must have, and docs/events.md.

``python -m rayloop.run.records.events`` prints docs/events.md. The kinds stand in rayloop/core/events.py and incidents.py.
"""

from __future__ import annotations

import inspect
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
"""Titles, and the modules whose classes stand below them."""
KINDS: dict[str, type[Event]] = {
    value.kind: value
    for module in PARTS.values()
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Event) and value is not Event
}
ENVELOPE = ("schema_version", "time", "event", "step")
"""What every record has besides the fields of its kind; ``step`` only while there is a driver."""

COMMON = {
    "why": "The reason, in a sentence.",
    "seconds": "How long it took.",
    "role": "Which role's actor: `rollout`, `environment`, `reward`, `reference`.",
    "worker": "Its serial number, never used twice.",
    "task": "Id of the task.",
    "trajectory": "`group/sample`: group number of the group and index within it.",
    "ledger": "Trajectories by state and reason since the run began.",
}
"""What a field means whose class does not say it."""


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
        self._lines.close()


def validate(records: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """What is wrong with these records of events.jsonl, one sentence each: a kind that is not in the table, a field that the
    kind lacks or does not have, a value of another type."""
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


HEADER = """# Events

Made by `python -m rayloop.run.records.events` from the classes in `rayloop/core/events.py` and `rayloop/core/incidents.py`; do not
edit. One record per event is in `events.jsonl` (see [run_folder.md](run_folder.md)): `event` (its name), `step` (the last finished
step; absent while there is no driver), `time` (Unix seconds), and all the fields of its kind. Durations are in seconds. `python -m
rayloop eval` writes an `events.jsonl` of the same kinds into its own folder. The last column says where in the code it is told.

"""


def reference() -> str:
    """docs/events.md."""
    common = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in COMMON.items())
    return (
        HEADER
        + "Fields that mean the same everywhere, unless the event says otherwise:\n\n| field | meaning |\n|---|---|\n"
        + common
        + "".join(_part(title, module.__name__) for title, module in PARTS.items())
    )


def _part(title: str, module: str) -> str:
    rows = "".join(_row(kind) for kind in KINDS.values() if kind.__module__ == module)
    return f"\n## {title}\n\n| event | what happened, and its fields | what to do | told by |\n|---|---|---|---|\n{rows}"


def _row(kind: type[Event]) -> str:
    happened, _, remedy = inspect.cleandoc(kind.__doc__ or "").replace("\n", " ").partition(" To do: ")
    cells = (f"`{kind.kind}`", " ".join([happened, *_fields(kind)]), remedy[:1].upper() + remedy[1:] or "Nothing.", f"`{kind.by}`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _fields(kind: type[Event]) -> Iterator[str]:
    """Each field as ``name``, with its meaning where it has one of its own."""
    if kind is events.Evaluated:
        return
    for name, about in _adapter(kind.kind).json_schema().get("properties", {}).items():
        meaning = about.get("description", "").replace("\n", " ")
        yield f"`{name}`: {meaning}" if meaning else f"`{name}`."


if __name__ == "__main__":
    print(reference(), end="")
