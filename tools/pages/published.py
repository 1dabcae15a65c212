"""``python -m tools.pages.published`` prints docs/published_values.md from each
``recipes/*/published.yaml``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayloop.config.settings import Component
from rayloop.run.config import read
from tools.pages.fits import of_cards, of_roles, on_gpus

ROOT = Path(__file__).parents[2]
HEADER = """# Published values, and ours

Made by `python -m tools.pages.published`; do not edit. Of each published system: every value
of its scripts beside ours, what differs in behaviour, and its prompts by the SHA-256 of their text.
A value without a key has its reason. The first configuration is the default, the second repeats the
original; where only one is named, it has the published values, and ours where none is stated.
Memory is what `estimate` computes for the second, with the longest trajectories that it allows; no
GPU has measured it.
"""
NOT_STATED = "not stated"
"""Stands for a published value that no source gives."""
ABSENT = object()
"""A configuration has nothing at this place."""
WHICH = ("default", "faithful")
"""The configurations of a system; without a ``faithful`` one, the default has published values."""


def files() -> list[Path]:
    """The data of all systems, sorted."""
    return sorted(ROOT.glob("recipes/*/published*.yaml"))


def page() -> str:
    """docs/published_values.md."""
    return "\n".join([HEADER, *("\n".join(section(path)) for path in files())])


def section(path: Path) -> Iterator[str]:
    """The lines of one system."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    source, folder = data["source"], path.parent.relative_to(ROOT)
    name = path.parent.name + path.stem.removeprefix("published").replace("_", " ")
    licence = "no licence" if source["licence"] in (None, "none") else source["licence"]
    yield f"## {name}\n"
    runs = ", ".join(f"`{folder}/{data[which]}`" for which in WHICH if which in data)
    yield f"`{source['repository']}` at {source['commit']} ({licence}). {runs}.\n"
    if "cards" in data:
        roles = on_gpus(path.parent / data["faithful"])
        yield from table(
            ("role as published", "GPUs", "GiB of each", "for", "smallest card"), of_roles(roles)
        )
        yield from table(("published cards", "fits", "why not"), of_cards(roles, data["cards"]))
    sources = data.get("sources") or {}
    yield from table(("source", "where"), ([key, f"`{at}`"] for key, at in sources.items()))
    columns = ("value", "key", "published", "ours", "reason", *(("from",) if sources else ()))
    yield from table(columns, (row_of(one)[: len(columns)] for one in data["values"]))
    names = ("what", "original", "corrected", "why", "run")
    yield from table(
        ("differs", *names[1:4], "which runs"),
        ([one.get(key, "") for key in names] for one in data["differences"]),
    )
    missing = data.get("missing") or ()
    yield from table(
        ("cannot be repeated", "why", "from"),
        ([one["what"], one["why"], one.get("from", "")] for one in missing),
    )
    prompts = (
        [one.get("file") or one.get("why", ""), one["from"], hash_of(one)]
        for one in data.get("prompts") or ()
    )
    yield from table(("prompt", "from", "SHA-256"), prompts)


def hash_of(prompt: Mapping[str, Any]) -> str:
    """The cell of a prompt's hash; empty where its bytes could not be had."""
    return f"`{prompt['sha256']}`" if "sha256" in prompt else ""


def row_of(one: Mapping[str, Any]) -> list[str]:
    """The cells of a published value."""
    ours = one.get("ours", one["published"]) if "key" in one else ABSENT
    key = f"`{one['key']}`" if "key" in one else ""
    return [
        one["what"],
        key,
        written(one["published"]),
        "" if ours is ABSENT else written(ours),
        one.get("reason", ""),
        one.get("from", ""),
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """A table in markdown; nothing without rows."""
    lines = [
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row) + " |"
        for row in rows
    ]
    if lines:
        yield "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines, ""])


def written(value: Any) -> str:
    """As YAML has it."""
    return (
        value
        if isinstance(value, str)
        else f"{value:g}"
        if isinstance(value, float)
        else json.dumps(value)
    )


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """What a dumped configuration has at a dotted key, defaults of components included; ABSENT
    where there is nothing.
    """
    found: Any = config
    rest = key
    while rest:
        if isinstance(found, Mapping) and found.get("use"):
            found = {**found, "with": _settings(found)}
        if not isinstance(found, Mapping):
            return ABSENT
        part = max(
            (name for name in map(str, found) if rest == name or rest.startswith(f"{name}.")),
            key=len,
            default=None,
        )
        if part is None:
            return ABSENT
        found, rest = found[part], rest[len(part) + 1 :]
    return found


def _settings(component: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its ``with``, with the defaults of its class."""
    made = Component.model_validate(
        {name: component[name] for name in ("use", "with") if name in component}
    )
    model = made.settings_class()
    if model is None:
        return dict(component.get("with") or {})
    return model.model_validate(component.get("with") or {}).model_dump(mode="json", by_alias=True)


def configurations(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The default and the faithful configuration of a file, as plain values.

    They are the same where a file has no faithful one. Raises ConfigError.
    """
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    default, faithful = (
        read(path.parent / data.get(name, data["default"]), []).model_dump(
            mode="json", by_alias=True
        )
        for name in WHICH
    )
    return default, faithful


if __name__ == "__main__":
    print(page(), end="")
