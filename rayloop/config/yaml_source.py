"""YAML 1.2 with the place of every value.

Layers: the ``extends`` file, the file, overrides. Mappings merge by key; lists and scalars are
replaced, and a mapping with another ``kind`` or ``use`` starts afresh.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rayloop.core.failures import ConfigError, nearest

KeyPath = tuple[str | int, ...]

COMMAND_LINE = "command line"
EXTENDS = "extends"
CHOICES = ("kind", "use")


@dataclass(frozen=True)
class Source:
    """Where each key of a loaded configuration was written.

    All sources are equal: origin is no part of a setting.
    """

    file: str = field(default="", compare=False)
    lines: dict[KeyPath, str] = field(default_factory=dict, compare=False)
    texts: dict[KeyPath, str] = field(default_factory=dict, compare=False)
    """What was written where a number or a truth value was read."""

    def where(self, path: KeyPath) -> str:
        """``file:line`` (or ``command line``) of a key, else of the nearest enclosing key, else the
        file.
        """
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, self.file)

    def forget(self, path: KeyPath) -> None:
        """Drop what is known below (and at) ``path``."""
        for kept in (self.lines, self.texts):
            for known in [known for known in kept if known[: len(path)] == path]:
                del kept[known]

    def take(self, other: "Source", path: KeyPath) -> None:
        """Know below (and at) ``path`` what ``other`` does, and nothing else."""
        self.forget(path)
        self.lines.update(
            {known: line for known, line in other.lines.items() if known[: len(path)] == path}
        )
        self.texts.update(
            {known: text for known, text in other.texts.items() if known[: len(path)] == path}
        )


def dotted(path: KeyPath) -> str:
    """The path as it stands in messages: ``data.train``."""
    return ".".join(map(str, path))


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
    )


def read(
    path: Path, overrides: Sequence[str] = (), over: Sequence[Path] = ()
) -> tuple[dict[str, Any], Source]:
    """The merged data of a file, its bases, the files laid ``over`` it and the overrides, with the
    origin of each key. Raises ConfigError for a missing or malformed file, a cycle of ``extends``,
    and malformed overrides.
    """
    data, source = _read_file(path, ())
    for layer in over:
        _merge(data, source, *_read_file(layer, ()), ())
    for override in overrides:
        _override(data, source, override)
    return data, source


def parse_value(text: str, where: str) -> Any:
    """One YAML value. Raises ConfigError that begins with ``where``."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {text!r} is not valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()


def _read_file(path: Path, within: tuple[Path, ...]) -> tuple[dict[str, Any], Source]:
    if path.resolve() in within:
        chain = " -> ".join(str(p) for p in (*within, path.resolve()))
        raise ConfigError(f"{path}: extends itself: {chain}. Remove one `extends`.")
    data, source = _parse_file(path)
    base = data.pop(EXTENDS, None)
    if base is None:
        return data, source
    if not isinstance(base, str):
        raise ConfigError(
            f"{source.where((EXTENDS,))}: extends: {base!r}: expected the name of one YAML file"
        )
    base_path = Path(os.path.normpath(path.parent / base))
    if not base_path.is_file():
        raise ConfigError(
            f"{source.where((EXTENDS,))}: extends: there is no file {base_path} (relative to this"
            " file)"
        )
    below, below_source = _read_file(base_path, (*within, path.resolve()))
    merged = Source(source.file, below_source.lines, below_source.texts)
    _merge(below, merged, data, source, ())
    return below, merged


def _parse_file(path: Path) -> tuple[dict[str, Any], Source]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        beside = [other.name for other in path.parent.glob("*.y*ml")] if not path.exists() else []
        raise ConfigError(f"{path}: cannot be read: {error}{nearest(path.name, beside)}") from error
    source = Source(str(path))
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        data = {} if node is None else _build(loader, node, source, ())
    except yaml.YAMLError as error:
        line = (
            error.problem_mark.line + 1
            if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark
            else 1
        )
        raise ConfigError(f"{path}:{line}: not valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}:1: expected keys and values, found {type(data).__name__} {data!r:.60}"
        )
    return data, source


def _build(loader: _Loader, node: yaml.Node, source: Source, path: KeyPath) -> Any:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            source.lines[(*path, index)] = f"{source.file}:{item.start_mark.line + 1}"
        return [
            _build(loader, item, source, (*path, index)) for index, item in enumerate(node.value)
        ]
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node)
        if isinstance(value, int | float):
            source.texts[path] = str(node.value)
        return value
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{source.file}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{where}: {dotted(path) or 'the file'}: a key must be a plain text")
        key = str(key_node.value)
        if key in mapping:
            raise ConfigError(
                f"{where}: {dotted((*path, key))}: set twice, first at {source.where((*path, key))}"
            )
        source.lines[(*path, key)] = where
        mapping[key] = _build(loader, value_node, source, (*path, key))
    return mapping


def _merge(
    base: dict[str, Any], origin: Source, layer: dict[str, Any], layer_source: Source, path: KeyPath
) -> None:
    """Lay ``layer`` over ``base``, in place, and the layer's lines over ``origin``'s."""
    if base and any(key in layer and base.get(key) != layer[key] for key in CHOICES):
        base.clear()
        origin.forget(path)
    for key, value in layer.items():
        here = (*path, key)
        below = base.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            _merge(below, origin, value, layer_source, here)
        else:
            base[key] = value
            origin.take(layer_source, here)
        origin.lines[here] = layer_source.where(here)


def _override(data: dict[str, Any], source: Source, override: str) -> None:
    """Apply one ``key.sub=value``; a list element is named by its index.

    The value replaces what was there.
    """
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{COMMAND_LINE}: {override!r}: expected key.sub=value, for example"
            " policy.optimizer.lr=1e-5"
        )
    value = parse_value(text, f"{COMMAND_LINE}: {name.strip()}")
    path: KeyPath = ()
    holder: Any = data
    for part, child in pairwise(parts):
        key = _key(holder, part, path)
        path = (*path, key)
        if isinstance(holder, dict) and holder.get(key) is None:
            if child.isdecimal():
                raise ConfigError(
                    f"{COMMAND_LINE}: {override!r}: no file sets the list {dotted(path)}; set it as"
                    f" a whole: {dotted(path)}=[...]"
                )
            holder[key] = {}
            source.lines[path] = COMMAND_LINE
        holder = holder[key]
    key = _key(holder, parts[-1], path)
    if key in CHOICES and isinstance(holder, dict) and holder.get(key) != value:
        for other in [k for k in holder if source.lines.get((*path, k)) != COMMAND_LINE]:
            del holder[other]
            source.forget((*path, other))
        source.lines[path] = COMMAND_LINE
    source.forget((*path, key))
    source.lines[(*path, key)] = COMMAND_LINE
    if isinstance(value, int | float):
        source.texts[(*path, key)] = text.strip()
    holder[key] = value


def _key(holder: Any, part: str, path: KeyPath) -> str | int:
    """``part`` as a key of a mapping or an index of a list.

    Raises ConfigError when it can be neither.
    """
    if isinstance(holder, dict):
        return part
    here = dotted((*path, part))
    if not isinstance(holder, list):
        raise ConfigError(
            f"{COMMAND_LINE}: {here}: {dotted(path)} is {holder!r:.60}, which has no keys"
        )
    if not part.isdecimal() or int(part) >= len(holder):
        raise ConfigError(
            f"{COMMAND_LINE}: {here}: {dotted(path)} is a list of {len(holder)}; use an index below"
            " that"
        )
    return int(part)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
