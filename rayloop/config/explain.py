"""The relation of settings classes to written data.

It gives the keys that are valid at each place, and errors in plain words.
"""

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined, to_jsonable_python

from rayloop.config.yaml_source import KeyPath, Source, dotted
from rayloop.core.failures import nearest

_EXPECTED = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "keys and values"),
    "string_type": "a text (a number as a text is written in quotes: '7')",
    "finite_number": "a finite number",
}


_EMBEDDED_CLASSES = ("Component", "EnvironmentKind")
"""Settings classes that may be written as their ``use`` alone by mistake."""
_QUOTED = re.compile(r"'([^']*)'")
_MAX_PLACES = 3
"""Places of a misplaced key that a message names."""


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, without Annotated and None.

    ``int | None`` has the alternatives ``(int,)``.
    """
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        alternatives: tuple[Any, ...] = ()
        for part in get_args(annotation):
            alternatives += members(part)
        return alternatives
    return () if annotation is types.NoneType else (annotation,)


def models(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The settings classes among the alternatives of an annotation."""
    return tuple(
        member
        for member in members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    )


def item(annotation: Any) -> Any:
    """The annotation of the elements of a list or of the values of a mapping.

    Any for an annotation that is neither.
    """
    for member in members(annotation):
        if get_origin(member) in (tuple, list, Sequence):
            return get_args(member)[0]
        if get_origin(member) in (dict, Mapping):
            return get_args(member)[1]
    return Any


def kind_of(model: type[BaseModel]) -> str | None:
    """The tag of a member of a tagged union: the only value of its ``kind``.

    None for other classes.
    """
    if "kind" not in model.model_fields:
        return None
    annotation = model.model_fields["kind"].annotation
    values = get_args(annotation) if get_origin(annotation) is Literal else ()
    return str(values[0]) if len(values) == 1 else None


def choose(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The settings class for ``value`` at this place; None without one.

    Its ``kind`` (default: the first) or ``use`` decides.
    """
    candidates = models(annotation)
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    if isinstance(value, Mapping) and "use" in value:
        fitting = [model for model in candidates if "use" in model.model_fields]
    else:
        kind = None
        if isinstance(value, Mapping):
            kind = value.get("kind", kind_of(candidates[0]))
        fitting = [model for model in candidates if kind_of(model) == kind]
    return fitting[0] if fitting else None


def keys(model: type[BaseModel]) -> dict[str, Any]:
    """The annotation of each key, by the name that a configuration has for it."""
    return {info.alias or name: info.annotation for name, info in model.model_fields.items()}


def defaults(model: type[BaseModel], data: Any, standard: Any = None) -> dict[str, Any]:
    """The default of each key of ``data``, which is a ``model`` as plain values.

    The kinds are the ones in ``data``; keys without a default are left out. ``standard``: the
    instance that is the default at this place.
    """
    default_values: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        key = info.alias or name
        if isinstance(standard, model):
            default = getattr(standard, name)
        else:
            default = info.get_default(call_default_factory=True)
        value = data.get(key) if isinstance(data, Mapping) else None
        section = choose(info.annotation, value) if isinstance(value, Mapping) else None
        if section is not None:
            default_values[key] = defaults(section, value, default)
        elif default is not PydanticUndefined:
            default_values[key] = to_jsonable_python(default, by_alias=True)
    return default_values


def walk(model: type[BaseModel]) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Every settings class below ``model`` with the path it is used at.

    ``*`` stands for an element of a list or mapping.
    """
    pending: list[tuple[KeyPath, type[BaseModel]]] = [((), model)]
    while pending:
        path, current = pending.pop(0)
        yield path, current
        nested: list[tuple[KeyPath, type[BaseModel]]] = []
        for key, annotation in keys(current).items():
            nested += [((*path, key), section) for section in models(annotation)]
            nested += [((*path, key, "*"), section) for section in models(item(annotation))]
        pending[:0] = nested


def explain(
    error: ValidationError, model: type[BaseModel], data: Any, source: Source, prefix: KeyPath = ()
) -> list[str]:
    """One line per problem: ``file:line: key: what is wrong``.

    ``data`` was written at ``prefix``.
    """
    lines = []
    for detail in error.errors(include_url=False):
        local_path, holder = _locate(detail, model, data)
        path = (*prefix, *local_path)
        problem = _problem(detail, holder, model)
        lines.append(f"{source.where(path)}: {dotted(path) or 'configuration'}: {problem}")
    return lines


def take_texts(error: ValidationError, model: type[BaseModel], data: Any, source: Source) -> bool:
    """Replace numbers in ``data`` by their written text, at the places that need a text.

    ``error`` names the places. Returns whether a number was replaced.
    """
    replaced = False
    for detail in error.errors(include_url=False):
        if detail["type"] != "string_type":
            continue
        path, _ = _locate(detail, model, data)
        text = source.texts.pop(path, None)
        if text is None:
            continue
        holder = data
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = text
        replaced = True
    return replaced


def _locate(
    detail: ErrorDetails, model: type[BaseModel], data: Any
) -> tuple[KeyPath, type[BaseModel] | None]:
    """The written path of an error, and the class that its last key belongs to.

    Pydantic's own path has the tags of unions too.
    """
    path: KeyPath = ()
    annotation: Any = model
    value = data
    holder = None
    for element in detail["loc"]:
        section = choose(annotation, value)
        section_keys = {} if section is None else keys(section)
        is_unknown_key = detail["type"] == "extra_forbidden" and element == detail["loc"][-1]
        if element in section_keys:
            annotation = section_keys[str(element)]
            holder = section
        elif section is not None and is_unknown_key:
            holder = section
        elif isinstance(element, int) or (isinstance(value, Mapping) and element in value):
            annotation = item(annotation)
        else:
            continue
        path = (*path, element)
        value = _child(value, element)
    if detail["type"] == "union_tag_invalid":
        path = (*path, "kind")
    return path, holder


def _child(value: Any, element: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(element)
    if isinstance(value, list | tuple) and isinstance(element, int):
        return value[element]
    return None


def _problem(detail: ErrorDetails, holder: type[BaseModel] | None, root: type[BaseModel]) -> str:
    """An error of pydantic in plain words; ``holder`` is the class with its key."""
    context = detail.get("ctx", {})
    value = detail["input"]
    is_text = isinstance(value, str)
    quoted_value = short(value)
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(str(detail["loc"][-1]), holder or root, root)
        case "missing":
            return "must be set"
        case "union_tag_not_found":
            return "needs a `kind`"
        case "union_tag_invalid":
            tag = context["tag"]
            tags = _QUOTED.findall(str(context["expected_tags"]))
            hint = nearest(str(tag), tags)
            return f"got {tag!r}, expected one of {', '.join(tags)}{hint}"
        case "model_type" if is_text and context.get("class_name") in _EMBEDDED_CLASSES:
            use = json.dumps(value, ensure_ascii=False)
            return f"got {quoted_value}, expected {{use: {use}}}"
        case "value_error":
            return str(context["error"])
        case "literal_error" | "enum":
            expected = str(context["expected"])
            hint = nearest(str(value), _QUOTED.findall(expected))
            return f"got {quoted_value}, expected {expected}{hint}"
    return f"got {quoted_value}, expected {_expected(detail)}"


def _expected(detail: ErrorDetails) -> str:
    """The kind of value that an error asks for."""
    expected = _EXPECTED.get(detail["type"])
    if expected is None:
        expected = detail["msg"].removeprefix("Input should be ").partition(", unable")[0]
    if expected.startswith(("greater", "less")):
        return f"a number {expected}"
    return expected


def _unknown_key(key: str, holder: type[BaseModel], root: type[BaseModel]) -> str:
    """The message for an unknown key, with the key that was probably meant.

    That is a key of the same name elsewhere, first of all one below; otherwise a similar key here.
    """
    valid_keys = list(keys(holder))
    places = [(dotted((*path, key)), model) for path, model in walk(root) if key in keys(model)]
    models_below = {model for _, model in walk(holder)}
    places_below = [place for place, model in places if model in models_below]
    candidates = dict.fromkeys(places_below or [place for place, _ in places])
    if candidates:
        hint = f"; it is a key of {' and '.join(list(candidates)[:_MAX_PLACES])}"
    else:
        hint = nearest(key, valid_keys)
    end = "" if hint.endswith("?") else "."
    return f"unknown key{hint}{end} Keys here: {', '.join(valid_keys) or 'none'}"


def short(value: Any, limit: int = 80) -> str:
    """The value as a message quotes it: its beginning when it is long."""
    try:
        text = repr(value)
    # Python does not print an integer of more than 4,300 digits.
    except ValueError:
        text = f"{type(value).__name__} of too many digits to show"
    return text if len(text) <= limit else text[: limit - 3] + "..."
