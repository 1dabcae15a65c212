"""How a run does, from its folder alone: the state for a person or a program."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rayloop.run.checkpoint import MARKER, CheckpointStore
from rayloop.run.folder import RunFolder
from rayloop.view.reader import Record
from rayloop.view.vitals import Vitals
from rayloop.view.words import describe, span

KEYS = ("in_service", "wanted", "lost", "budget_left")
COLUMNS = ("role", "in service", "wanted", "lost", "may be lost this hour")
ROW = "{:<13}{:<12}{:<8}{:<6}{}"


def status(folder: RunFolder, now: float, events: Iterable[Record]) -> dict[str, Any]:
    """What is known of the run at ``now`` (Unix seconds) by its ``events``, as plain values;
    durations are in seconds.
    """
    settings = folder.configuration
    vitals = Vitals(folder, settings)
    for event in events:
        vitals.take(event)
    holder = folder.lock.holder()
    # A process that was killed behind a save has not recorded it.
    with suppress(OSError):
        newest = CheckpointStore(folder.checkpoints, keep=1).find("auto")
        if newest is not None and newest.step != vitals.checkpoint_step:
            vitals.checkpoint_step, vitals.checkpoint_time = (
                newest.step,
                (newest.folder / MARKER).stat().st_mtime,
            )
    metrics = {key.removeprefix("recovery/"): value for key, value in vitals.metrics(now).items()}
    roles = {name: {key: int(metrics[f"{key}/{name}"]) for key in KEYS} for name in vitals.roles}
    return {
        "run": str(folder.path),
        "process": None if holder is None else str(holder),
        "end": vitals.end,
        "step": vitals.step,
        "steps": settings.get("steps"),
        "checkpoint_step": None if vitals.checkpoint_time is None else vitals.checkpoint_step,
        **{key: metrics.get(key) for key in ("checkpoint_age", "progress_age", "lock_age")},
        "driver_restarts_left": int(metrics["budget_left/driver"]),
        "roles": (
            roles if holder else {name: {**role, "in_service": 0} for name, role in roles.items()}
        ),
        "incidents": [{**record, "ago": now - record["time"]} for record in vitals.incidents],
        "damaged": folder.damage(),
    }


def text(found: dict[str, Any]) -> str:
    """The status for a person."""
    lines = [
        f"{found['run']}: {state(found)}",
        f"step {found['step']} of {found['steps']}{_ago(found, 'progress_age', 'last progress')}",
    ]
    if found["checkpoint_step"] is None:
        lines.append("no checkpoint yet: what is trained is lost when the run ends now")
    else:
        lines.append(
            f"checkpoint of step {found['checkpoint_step']}{_ago(found, 'checkpoint_age', 'saved')}"
        )
    if found["roles"] and found["process"] is not None:
        rows = [
            COLUMNS,
            *((name, *(role[key] for key in KEYS)) for name, role in found["roles"].items()),
        ]
        lines += ["", *(ROW.format(*row) for row in rows)]
        lines.append(
            f"the driver may be restarted {found['driver_restarts_left']} times more in this hour"
        )
    if found["incidents"]:
        lines += [
            "",
            "last incidents",
            *(f"{span(i['ago'])} ago: {brief(i)}" for i in found["incidents"]),
        ]
    if found["damaged"]:
        lines += ["", found["damaged"]]
    return "\n".join(lines)


def state(found: dict[str, Any]) -> str:
    """Who runs it, or how it ended."""
    if found["process"] is not None:
        return f"{found['process']} runs it{_ago(found, 'lock_age', 'last sign of life')}"
    if found["end"] is None:
        return (
            "nobody runs it, and it recorded no end: its process was killed, or its host. Start it"
            " again: it continues"
        )
    why = found["end"].get("why")
    return f"ended: {found['end']['event']}{f', {why}' if why else ''}"


def _ago(found: dict[str, Any], key: str, what: str) -> str:
    return (
        "" if found[key] is None else f", {what} {span(max(0.0, found[key]))} ago"
    )  # clocks of two machines may differ


def brief(record: Record) -> str:
    """The first line of an event, at most 200 characters."""
    event = {
        key: value
        for key, value in record.items()
        if key not in ("ago", "traceback", "schema_version", "time")
    }
    return describe(event).partition("\n")[0][:200]
