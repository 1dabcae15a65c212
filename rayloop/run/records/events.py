"""Where events are kept. Their kinds are the classes in rayloop/core/events.py and incidents.py."""

from typing import Any

from rayloop.core import events, incidents
from rayloop.core.events import Event
from rayloop.run.records.jsonl import JsonLines

PARTS = {"What every run does": events, "Incidents": incidents}
KINDS: dict[str, type[Event]] = {
    value.kind: value
    for module in PARTS.values()
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Event) and value is not Event
}


class EventLog(JsonLines):
    """``events.jsonl``: append-only, one record per event."""

    def emit(self, event: Event, step: int | None = None) -> dict[str, Any]:
        """Write the event, or hold it while the storage refuses; returns its record, without schema version and time."""
        fields = event.record()
        record = {"event": fields.pop("event"), **({} if step is None else {"step": step}), **fields}
        self.append(record)
        return record
