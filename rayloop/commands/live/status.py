"""``status``: step, progress, checkpoint and the workers of each role, from the folder of a run."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rayloop.run.folder import RunFolder
from rayloop.view.reader import configuration, open_run
from rayloop.view.vitals import Vitals
from rayloop.view.words import describe, span, visible

KEYS = ("in_service", "wanted", "lost", "budget_left")
COLUMNS = ("role", "in service", "wanted", "lost", "may be lost this hour")
ROW = "{:<13}{:<12}{:<8}{:<6}{}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``status``."""
    parser.add_argument("run_folder", type=Path, metavar="RUN_DIR", help="folder of the run, <output>/<name>")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object, for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the status. Returns 0; raises ConfigError when the folder holds no run."""
    folder = open_run(arguments.run_folder)
    found = status(folder, time.time())
    print(json.dumps(found) if arguments.json else visible(text(found)))
    return 0


def status(folder: RunFolder, now: float) -> dict[str, Any]:
    """What is known of the run at ``now`` (Unix seconds), as plain values; durations are in seconds."""
    settings = configuration(folder)
    vitals = Vitals(folder, settings)
    vitals.update()
    holder = folder.lock.holder()
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
        "roles": roles if holder else {name: {**role, "in_service": 0} for name, role in roles.items()},
        "incidents": [{**record, "ago": now - record["time"]} for record in vitals.incidents],
    }


def text(found: dict[str, Any]) -> str:
    """The status for a person."""
    lines = [
        f"{found['run']}: {_state(found)}",
        f"step {found['step']} of {found['steps']}{_ago(found, 'progress_age', 'last progress')}",
    ]
    if found["checkpoint_step"] is None:
        lines.append("no checkpoint yet: what is trained is lost when the run ends now")
    else:
        lines.append(f"checkpoint of step {found['checkpoint_step']}{_ago(found, 'checkpoint_age', 'saved')}")
    if found["roles"]:
        rows = [COLUMNS, *((name, *(role[key] for key in KEYS)) for name, role in found["roles"].items())]
        lines += ["", *(ROW.format(*row) for row in rows)]
        lines.append(f"the driver may be restarted {found['driver_restarts_left']} times more in this hour")
    if found["incidents"]:
        lines += ["", "last incidents", *(f"{span(i['ago'])} ago: {_brief(i)}" for i in found["incidents"])]
    return "\n".join(lines)


def _state(found: dict[str, Any]) -> str:
    if found["process"] is not None:
        return f"{found['process']} runs it{_ago(found, 'lock_age', 'last sign of life')}"
    if found["end"] is None:
        return "nobody runs it, and it recorded no end: its process was killed, or its host. Start it again: it continues"
    why = found["end"].get("why")
    return f"ended: {found['end']['event']}{f', {why}' if why else ''}"


def _ago(found: dict[str, Any], key: str, what: str) -> str:
    return "" if found[key] is None else f", {what} {span(max(0.0, found[key]))} ago"  # clocks of two machines may differ


def _brief(record: dict[str, Any]) -> str:
    event = {key: value for key, value in record.items() if key not in ("ago", "traceback", "schema_version", "time")}
    return describe(event).partition("\n")[0][:200]
