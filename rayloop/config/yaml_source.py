"""YAML 1.2 with the file and line of every value.

Layers: the ``extends`` file, the file, overrides. Mappings merge by key; lists and scalars are
replaced, and so is a mapping whose ``kind`` or ``use`` differs.
"""

import os
import re
from collections.abc import Mapping, Sequence
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
    """The places where the keys of a loaded configuration were written.

    All sources are equal: the origin is not part of a setting.
    """

    file: str = field(default="", compare=False)
    lines: dict[KeyPath, str] = field(default_factory=dict, compare=False)
    texts: dict[KeyPath, str] = field(default_factory=dict, compare=False)
    """The written text of each number and truth value."""

    def where(self, path: KeyPath) -> str:
        """``file:line`` (or ``command line``) of a key.

        A key without a line has that of the nearest enclosing key, or the file.
        """
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, self.file)

    def forget(self, path: KeyPath) -> None:
        """Remove the entries below (and at) ``path``."""
        for entries in (self.lines, self.texts):
            for key in _below(entries, path):
                del entries[key]

    def take(self, other: "Source", path: KeyPath) -> None:
        """Replace the entries below (and at) ``path`` by the entries of ``other``."""
        self.forget(path)
        self.lines.update(_below(other.lines, path))
        self.texts.update(_below(other.texts, path))


def _below(entries: dict[KeyPath, str], path: KeyPath) -> dict[KeyPath, str]:
    return {key: entry for key, entry in entries.items() if key[: len(path)] == path}


def dotted(path: KeyPath) -> str:
    """The path as messages have it: ``data.train``."""
    return ".".join(map(str, path))


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Each value that is not a mapping with keys, by its dotted key."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    parts = (flat(part, f"{prefix}.{key}" if prefix else key) for key, part in value.items())
    return {key: each for part in parts for key, each in part.items()}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
"""Tag, pattern and first characters of each scalar type."""
for _tag, _pattern, _first_characters in _SCALARS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first_characters
    )


def read(
    path: Path, overrides: Sequence[str] = (), over: Sequence[Path] = ()
) -> tuple[dict[str, Any], Source]:
    """The merged data of a file and its layers, with the origin of each key.

    The layers are its bases, the files laid ``over`` it and the overrides. Raises ConfigError for a
    missing or malformed file, a cycle of ``extends``, and malformed overrides.
    """
    data, source = _read_file(path, ())
    for layer_path in over:
        layer, layer_source = _read_file(layer_path, ())
        _merge(data, source, layer, layer_source, ())
    for override in overrides:
        _override(data, source, override)
    return data, source


def change(data: dict[str, Any], overrides: Sequence[str]) -> Source:
    """Change ``data`` by ``key.sub=value``, and return where the changed keys come from.

    Raises ConfigError for malformed overrides.
    """
    source = Source(os.devnull)
    for override in overrides:
        _override(data, source, override)
    return source


def parse_value(text: str, where: str) -> Any:
    """One YAML value. Raises ConfigError that begins with ``where``."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {text!r} is not valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()


def _read_file(path: Path, extending: tuple[Path, ...]) -> tuple[dict[str, Any], Source]:
    """A file merged over the file that it ``extends``; ``extending``: the files that extend it."""
    chain = (*extending, path.resolve())
    if path.resolve() in extending:
        files = " -> ".join(map(str, chain))
        raise ConfigError(f"{path}: extends itself: {files}. Remove one `extends`.")
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
            f"{source.where((EXTENDS,))}: extends: the file {base_path} does not exist (relative to"
            " this file)"
        )
    merged, base_source = _read_file(base_path, chain)
    merged_source = Source(source.file, base_source.lines, base_source.texts)
    _merge(merged, merged_source, data, source, ())
    return merged, merged_source


def _parse_file(path: Path) -> tuple[dict[str, Any], Source]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = []
        if not path.exists():
            names = [other.name for other in path.parent.glob("*.y*ml")]
        raise ConfigError(f"{path}: cannot be read: {error}{nearest(path.name, names)}") from error
    source = Source(str(path))
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        data = {} if node is None else _build(loader, node, source, ())
    except yaml.YAMLError as error:
        line = 1
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            line = error.problem_mark.line + 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {_one_line(error)}") from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}:1: expected keys and values, found {type(data).__name__} {data!r:.60}"
        )
    return data, source


def _build(loader: _Loader, node: yaml.Node, source: Source, path: KeyPath) -> Any:
    """The value of a node at ``path``; its lines and texts are added to ``source``."""
    if isinstance(node, yaml.SequenceNode):
        elements = []
        for index, element in enumerate(node.value):
            source.lines[(*path, index)] = f"{source.file}:{element.start_mark.line + 1}"
            elements.append(_build(loader, element, source, (*path, index)))
        return elements
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(loader, node, source, path)
    value = loader.construct_object(node)
    if isinstance(value, int | float):
        source.texts[path] = str(node.value)
    return value


def _build_mapping(
    loader: _Loader, node: yaml.MappingNode, source: Source, path: KeyPath
) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = f"{source.file}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{line}: {dotted(path) or 'the file'}: a key must be a plain text")
        key = str(key_node.value)
        key_path = (*path, key)
        if key in mapping:
            first_line = source.where(key_path)
            raise ConfigError(f"{line}: {dotted(key_path)}: set twice, first at {first_line}")
        source.lines[key_path] = line
        mapping[key] = _build(loader, value_node, source, key_path)
    return mapping


def _merge(
    base: dict[str, Any], origin: Source, layer: dict[str, Any], layer_source: Source, path: KeyPath
) -> None:
    """Lay ``layer`` over ``base``, in place, and the layer's lines over ``origin``'s."""
    changes_choice = any(key in layer and base.get(key) != layer[key] for key in CHOICES)
    if base and changes_choice:
        base.clear()
        origin.forget(path)
    for key, value in layer.items():
        key_path = (*path, key)
        base_value = base.get(key)
        if isinstance(base_value, dict) and isinstance(value, dict):
            _merge(base_value, origin, value, layer_source, key_path)
        else:
            base[key] = value
            origin.take(layer_source, key_path)
        origin.lines[key_path] = layer_source.where(key_path)


def _override(data: dict[str, Any], source: Source, override: str) -> None:
    """Apply one ``key.sub=value``; a list element is named by its index.

    The value replaces the earlier one.
    """
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{COMMAND_LINE}: {override!r}: expected key.sub=value, for example"
            " policy.optimizer.lr=1e-5"
        )
    value = parse_value(text, f"{COMMAND_LINE}: {name.strip()}")
    path, holder = _holder(data, source, parts, override)
    key = _key(holder, parts[-1], path)
    if key in CHOICES and isinstance(holder, dict) and holder.get(key) != value:
        _remove_file_keys(holder, source, path)
    key_path = (*path, key)
    source.forget(key_path)
    source.lines[key_path] = COMMAND_LINE
    if isinstance(value, int | float):
        source.texts[key_path] = text.strip()
    holder[key] = value


def _holder(
    data: dict[str, Any], source: Source, parts: list[str], override: str
) -> tuple[KeyPath, Any]:
    """The mapping or list with an override's last key, and its path.

    Mappings on the way are made where they are missing.
    """
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
    return path, holder


def _remove_file_keys(holder: dict[str, Any], source: Source, path: KeyPath) -> None:
    """Remove the keys that files set: they belong to another ``kind`` or ``use``."""
    for key in list(holder):
        if source.lines.get((*path, key)) != COMMAND_LINE:
            del holder[key]
            source.forget((*path, key))
    source.lines[path] = COMMAND_LINE


def _key(holder: Any, part: str, path: KeyPath) -> str | int:
    """``part`` as a key of a mapping or an index of a list.

    Raises ConfigError when it can be neither.
    """
    if isinstance(holder, dict):
        return part
    name = dotted((*path, part))
    if not isinstance(holder, list):
        raise ConfigError(
            f"{COMMAND_LINE}: {name}: {dotted(path)} is {holder!r:.60}, which has no keys"
        )
    if not part.isdecimal() or int(part) >= len(holder):
        raise ConfigError(
            f"{COMMAND_LINE}: {name}: {dotted(path)} is a list of {len(holder)}; use an index below"
            " that"
        )
    return int(part)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
