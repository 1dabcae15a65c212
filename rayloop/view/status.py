"""The state of a run, from its folder alone, for a user or a program."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rayloop.run.checkpoint import MARKER, CheckpointStore
from rayloop.run.folder import RunFolder
from rayloop.view.formatting import describe, span
from rayloop.view.health import RunHealth
from rayloop.view.reader import Record

KEYS = ("in_service", "wanted", "lost", "budget_left")
COLUMNS = ("role", "in service", "wanted", "lost", "may be lost this hour")
ROW = "{:<13}{:<12}{:<8}{:<6}{}"


def status(folder: RunFolder, now: float, events: Iterable[Record]) -> dict[str, Any]:
    """The state of the run at ``now`` (Unix seconds) by its ``events``, as plain values.

    Durations are in seconds.
    """
    settings = folder.configuration
    health = RunHealth(folder, settings)
    for event in events:
        health.take(event)
    holder = folder.lock.holder()
    # A process that was killed behind a save has not recorded it.
    with suppress(OSError):
        newest = CheckpointStore(folder.checkpoints, keep=1).find("auto")
        if newest is not None and newest.step != health.checkpoint_step:
            saved_at = (newest.folder / MARKER).stat().st_mtime
            health.checkpoint_step = newest.step
            health.checkpoint_time = saved_at
    metrics = {key.removeprefix("recovery/"): value for key, value in health.metrics(now).items()}
    roles: dict[str, dict[str, int]] = {}
    for name in health.roles:
        roles[name] = {key: int(metrics[f"{key}/{name}"]) for key in KEYS}
        if holder is None:
            roles[name]["in_service"] = 0
    return {
        "run": str(folder.path),
        "process": None if holder is None else str(holder),
        "end": health.end,
        "step": health.step,
        "steps": settings.get("steps"),
        "checkpoint_step": None if health.checkpoint_time is None else health.checkpoint_step,
        **{key: metrics.get(key) for key in ("checkpoint_age", "progress_age", "lock_age")},
        "driver_restarts_left": int(metrics["budget_left/driver"]),
        "roles": roles,
        "incidents": [{**record, "ago": now - record["time"]} for record in health.incidents],
        "damaged": folder.damage(),
    }


def text(found: dict[str, Any]) -> str:
    """The status as lines for a terminal."""
    last_progress = _ago(found, "progress_age", "last progress")
    lines = [
        f"{found['run']}: {state(found)}",
        f"step {found['step']} of {found['steps']}{last_progress}",
    ]
    if found["checkpoint_step"] is None:
        lines.append("no checkpoint yet: what is trained is lost when the run ends now")
    else:
        saved = _ago(found, "checkpoint_age", "saved")
        lines.append(f"checkpoint of step {found['checkpoint_step']}{saved}")
    if found["roles"] and found["process"] is not None:
        lines += ["", ROW.format(*COLUMNS)]
        for name, role in found["roles"].items():
            lines.append(ROW.format(name, *(role[key] for key in KEYS)))
        lines.append(
            f"the driver may be restarted {found['driver_restarts_left']} times more in this hour"
        )
    if found["incidents"]:
        lines += ["", "last incidents"]
        for incident in found["incidents"]:
            lines.append(f"{span(incident['ago'])} ago: {brief(incident)}")
    if found["damaged"]:
        lines += ["", found["damaged"]]
    return "\n".join(lines)


def state(found: dict[str, Any]) -> str:
    """The process that runs the run, or how the run ended."""
    if found["process"] is not None:
        return f"{found['process']} runs it{_ago(found, 'lock_age', 'last sign of life')}"
    if found["end"] is None:
        return (
            "nobody runs it, and it recorded no end: its process was killed, or its host. Start it"
            " again: it continues"
        )
    reason = found["end"].get("why")
    suffix = f", {reason}" if reason else ""
    return f"ended: {found['end']['event']}{suffix}"


def _ago(found: dict[str, Any], key: str, label: str) -> str:
    if found[key] is None:
        return ""
    # Clocks of two machines may differ, so that an age may be negative.
    return f", {label} {span(max(0.0, found[key]))} ago"


def brief(record: Record) -> str:
    """The first line of an event, at most 200 characters."""
    event = {
        key: value
        for key, value in record.items()
        if key not in ("ago", "traceback", "schema_version", "time")
    }
    return describe(event).partition("\n")[0][:200]
