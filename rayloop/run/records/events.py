"""Where events are kept. Their kinds are the classes in rayloop/core/events.py and incidents.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayloop.core import events, incidents
from rayloop.core.events import Event
from rayloop.run.records.jsonl import JsonLines, is_number

PARTS = {"What every run does": events, "Incidents": incidents}
KINDS: dict[str, type[Event]] = {
    value.kind: value
    for module in PARTS.values()
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Event) and value is not Event
}


READ: Mapping[str, tuple[str, ...]] = {
    "begin": ("step", "restored"),
    "starting": ("actors",),
    "trained": ("step", "groups"),
    "checkpoint": ("step",),
    "evaluated": ("step",),
    "controls": ("step", "differences"),
    "gain": ("step", "since", "rewards"),
    "worker_lost": ("role", "worker"),
    "worker_replaced": ("role", "worker"),
    "replacement_failed": ("role",),
    "finished": ("ledger",),
    "preempted": ("ledger",),
    "failed": ("ledger",),
}
"""Kind -> the fields without which its readers cannot use an event.

All others may be missing, as older versions wrote them.
"""


def is_event(record: Mapping[str, Any]) -> bool:
    """Whether a record is an event as this or an older version writes it."""
    kind = record.get("event")
    step = record.get("step", 0)
    if not (isinstance(kind, str) and is_number(record.get("time")) and is_number(step)):
        return False
    return record.keys() >= set(READ.get(kind, ()))


class EventLog(JsonLines):
    """``events.jsonl``: append-only, one record per event."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, is_event)

    def emit(self, event: Event, step: int | None = None) -> dict[str, Any]:
        """Write the event, or hold it while the storage refuses.

        Returns its record, without schema version and time.
        """
        fields = event.record()
        record = {
            "event": fields.pop("event"),
            **({} if step is None else {"step": step}),
            **fields,
        }
        self.append(record)
        return record
