"""What a run folder has on record, read back for people: needs neither Ray, nor torch, nor the model."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rayloop.config.settings import Component
from rayloop.core.failures import ConfigError
from rayloop.core.protocols import BoxReader
from rayloop.run.folder import RunFolder
from rayloop.run.records.jsonl import JsonLines

Record = dict[str, Any]
T = TypeVar("T")
ENDS = ("finished", "preempted", "failed")


def open_run(path: Path) -> RunFolder:
    """The run folder at ``path``. Raises ConfigError when no run has begun there."""
    folder = RunFolder.at(path.resolve())
    if not folder.used:
        raise ConfigError(
            f"{path} holds no run: neither config.yaml nor metrics.jsonl is there. Name a run's folder, <output>/<name>."
        )
    return folder


def configuration(folder: RunFolder) -> Record:
    """The run's configuration as plain data: it may have been written by another version of rayloop."""
    return yaml.safe_load(folder.config.read_text(encoding="utf-8")) if folder.config.exists() else {}


def box_reader(config: Mapping[str, Any]) -> BoxReader | None:
    """What ``report.boxes`` names. Raises ConfigError when it cannot be loaded."""
    named = (config.get("report") or {}).get("boxes")
    return Component.model_validate(named).build() if named else None


def tint_note(config: Mapping[str, Any]) -> str:
    """A sentence about the colours of the recorded images; empty when they have none but their own."""
    tint = (config.get("model") or {}).get("position_tint")
    if not tint:
        return ""
    return (
        "Pictures are as the model was shown them, coloured by position: red grows to the right, blue downwards "
        f"(model.position_tint: {tint}). The originals are without these colours."
    )


def by_step(events: Iterable[Record], name: str) -> dict[int, Record]:
    """Step -> the event called ``name``. What a later restore superseded is left out."""
    found: dict[int, Record] = {}
    for event in events:
        if event["event"] == "begin":
            found = {step: record for step, record in found.items() if step <= event["step"]}
        elif event["event"] == name:
            found[event["step"]] = event
    return found


def series(records: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float | None]]]:
    """Metric -> (step, value) pairs in order; None where the number was not finite."""
    found: dict[str, list[tuple[int, float | None]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("schema_version", "time", "step", "event"):
                found.setdefault(name, []).append((int(record["step"]), value))
    return found


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit a pattern, in the order of the patterns; ``*`` stands for text without a slash."""
    names = list(names)
    fitting = (name for p in patterns for name in names if re.fullmatch(re.escape(p).replace(r"\*", "[^/]+"), name))
    return list(dict.fromkeys(fitting))


def rollout_groups(folder: RunFolder) -> Iterator[list[Record]]:
    """The recorded groups, each as the records of its members, by step and group number."""
    for file in folder.rollouts.files().values():
        groups: dict[int, list[Record]] = {}
        for record in JsonLines(file):
            groups.setdefault(record["group"], []).append(record)
        yield from (groups[number] for number in sorted(groups))


def evenly(items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, evenly spread, in order, the first included."""
    return [items[index * len(items) // count] for index in range(count)] if len(items) > count else list(items)


def image_path(entry: Mapping[str, Any], folder: Path) -> Path:
    """Where an image entry's bytes lie: its ``file`` relative to ``folder``, or the ``path`` it was read from."""
    return folder / entry["file"] if "file" in entry else Path(entry["path"])
