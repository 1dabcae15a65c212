"""``python -m tools.pages.events`` prints docs/events.md."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import TypeAdapter

from rayloop.core import events
from rayloop.core.events import Event
from rayloop.run.records.events import KINDS, PARTS

COMMON = {
    "why": "The reason, in a sentence.",
    "seconds": "How long it took.",
    "role": "Which role's actor: `rollout`, `environment`, `reward`, `reference`.",
    "worker": "Its serial number, never used twice.",
    "name": "Host name and address of the node.",
    "node": "Host name and address of its node; empty when unknown.",
    "path": "The file at fault, with its row.",
    "task": "Id of the task.",
    "trajectory": "`group/sample`: group number of the group and index within it.",
    "version": "`lineage.step`.",
    "ledger": "Trajectories by state and reason since the run began.",
}
"""What a field means whose class does not say it."""

HEADER = """# Events

Made by `python -m tools.pages.events` from the classes in `rayloop/core/events.py` and
`rayloop/core/incidents.py`; do not edit. One record per event is in `events.jsonl` (see
[run_folder.md](run_folder.md)): `event` (its name), `step` (the last finished step; absent while
there is no driver), `time` (Unix seconds), and all the fields of its kind. Durations are in
seconds. `python -m rayloop eval` writes an `events.jsonl` of the same kinds into its own folder.
The last column names the code that emits it.

"""


def reference() -> str:
    """docs/events.md."""
    common = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in COMMON.items())
    return (
        HEADER
        + "Fields that mean the same everywhere, unless the event says otherwise:\n\n| field |"
        " meaning |\n|---|---|\n"
        + common
        + "".join(_part(title, module.__name__) for title, module in PARTS.items())
    )


def _part(title: str, module: str) -> str:
    rows = "".join(_row(kind) for kind in KINDS.values() if kind.__module__ == module)
    return (
        f"\n## {title}\n\n| event | what happened, and its fields | what to do | emitted by"
        f" |\n|---|---|---|---|\n{rows}"
    )


def _row(kind: type[Event]) -> str:
    about = " ".join((kind.__doc__ or "").split())
    happened, _, remedy = about.partition(" To do: ")
    cells = (
        f"`{kind.kind}`",
        " ".join([happened, *_fields(kind)]),
        remedy[:1].upper() + remedy[1:] or "Nothing.",
        f"`{kind.by}`",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _fields(kind: type[Event]) -> Iterator[str]:
    """Each field as ``name``, with its meaning where it has one of its own."""
    if kind is events.Evaluated:
        return
    for name, about in TypeAdapter(kind).json_schema().get("properties", {}).items():
        meaning = about.get("description", "").replace("\n", " ")
        yield f"`{name}`: {meaning}" if meaning else f"`{name}`."


if __name__ == "__main__":
    print(reference(), end="")
