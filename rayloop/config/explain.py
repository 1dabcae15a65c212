"""Settings classes and written data side by side: the keys that are valid at each place, and errors
in plain words.
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


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, without Annotated and None: ``int | None`` -> ``(int,)``."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(m for part in get_args(annotation) for m in members(part))
    return () if annotation is types.NoneType else (annotation,)


def models(annotation: Any) -> tuple[type[BaseModel], ...]:
    """The settings classes among the alternatives of an annotation."""
    return tuple(m for m in members(annotation) if isinstance(m, type) and issubclass(m, BaseModel))


def item(annotation: Any) -> Any:
    """The annotation of the elements of a list or of the values of a mapping; Any where it has
    neither.
    """
    for member in members(annotation):
        if get_origin(member) in (tuple, list, Sequence):
            return get_args(member)[0]
        if get_origin(member) in (dict, Mapping):
            return get_args(member)[1]
    return Any


def kind_of(model: type[BaseModel]) -> str | None:
    """The tag of a member of a tagged union: the only value of its ``kind``; None for other
    classes.
    """
    if "kind" not in model.model_fields:
        return None
    annotation = model.model_fields["kind"].annotation
    values = get_args(annotation) if get_origin(annotation) is Literal else ()
    return str(values[0]) if len(values) == 1 else None


def choose(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The settings class for ``value`` at this place, by its ``kind`` (default: the first) or
    ``use``; None without one.
    """
    found = models(annotation)
    if len(found) > 1 and isinstance(value, Mapping) and "use" in value:
        found = tuple(model for model in found if "use" in model.model_fields)
    elif len(found) > 1:
        kind = value.get("kind", kind_of(found[0])) if isinstance(value, Mapping) else None
        found = tuple(model for model in found if kind_of(model) == kind)
    return found[0] if found else None


def keys(model: type[BaseModel]) -> dict[str, Any]:
    """Key as a person writes it -> annotation."""
    return {info.alias or name: info.annotation for name, info in model.model_fields.items()}


def defaults(model: type[BaseModel], data: Any, standard: Any = None) -> dict[str, Any]:
    """The default of each key of ``data``, a ``model`` as plain values, with the kinds that
    ``data`` chose; keys without a default are left out. ``standard``: the instance that is the
    default at this place.
    """
    found = dict[str, Any]()
    for name, info in model.model_fields.items():
        key = info.alias or name
        usual = (
            getattr(standard, name)
            if isinstance(standard, model)
            else info.get_default(call_default_factory=True)
        )
        value = data.get(key) if isinstance(data, Mapping) else None
        inner = choose(info.annotation, value) if isinstance(value, Mapping) else None
        if inner is not None:
            found[key] = defaults(inner, value, usual)
        elif usual is not PydanticUndefined:
            found[key] = to_jsonable_python(usual, by_alias=True)
    return found


def walk(model: type[BaseModel]) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    """Every settings class below ``model`` with the path it is used at; ``*`` stands for an
    element.
    """
    pending: list[tuple[KeyPath, type[BaseModel]]] = [((), model)]
    while pending:
        path, current = pending.pop(0)
        yield path, current
        below: list[tuple[KeyPath, type[BaseModel]]] = []
        for key, annotation in keys(current).items():
            below += [((*path, key), m) for m in models(annotation)]
            below += [((*path, key, "*"), m) for m in models(item(annotation))]
        pending[:0] = below


def explain(
    error: ValidationError, model: type[BaseModel], data: Any, source: Source, prefix: KeyPath = ()
) -> list[str]:
    """One line per problem: ``file:line: key: what is wrong``.

    ``data`` was written at ``prefix``.
    """
    lines = []
    for detail in error.errors(include_url=False):
        path, holder = _locate(detail, model, data)
        here = (*prefix, *path)
        lines.append(
            f"{source.where(here)}: {dotted(here) or 'configuration'}:"
            f" {_words(detail, holder, model)}"
        )
    return lines


def take_texts(error: ValidationError, model: type[BaseModel], data: Any, source: Source) -> bool:
    """Put into ``data`` what was written at the places of ``error`` that want a text and got a
    number. Returns whether it did.
    """
    found = False
    for detail in error.errors(include_url=False):
        path, _ = _locate(detail, model, data)
        text = source.texts.pop(path, None) if detail["type"] == "string_type" else None
        if text is not None:
            holder = data
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = text
            found = True
    return found


def _locate(
    detail: ErrorDetails, model: type[BaseModel], data: Any
) -> tuple[KeyPath, type[BaseModel] | None]:
    """The written path of an error (pydantic mixes union tags into its own), and the class its last
    key belongs to.
    """
    path: KeyPath = ()
    annotation, value, holder = model, data, None
    for element in detail["loc"]:
        cls = choose(annotation, value)
        if cls is not None and element in (known := keys(cls)):
            annotation, holder = known[str(element)], cls
        elif (
            cls is not None and detail["type"] == "extra_forbidden" and element == detail["loc"][-1]
        ):
            holder = cls
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
    return value[element] if isinstance(value, list | tuple) and isinstance(element, int) else None


COMPONENTS = ("Component", "EnvironmentKind")


def _words(detail: ErrorDetails, holder: type[BaseModel] | None, root: type[BaseModel]) -> str:
    context, value = detail.get("ctx", {}), short(detail["input"])
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(str(detail["loc"][-1]), holder or root, root)
        case "missing":
            return "must be set"
        case "union_tag_not_found":
            return "needs a `kind`"
        case "union_tag_invalid":
            tags = re.findall(r"'([^']*)'", str(context["expected_tags"]))
            return f"got {context['tag']!r}, expected one of {', '.join(tags)}" + nearest(
                str(context["tag"]), tags
            )
        case "model_type" if context.get("class_name") in COMPONENTS and isinstance(
            detail["input"], str
        ):
            return (
                f"got {value}, expected {{use: {json.dumps(detail['input'], ensure_ascii=False)}}}"
            )
        case "value_error":
            return str(context["error"])
        case "literal_error" | "enum":
            values = re.findall(r"'([^']*)'", str(context["expected"]))
            return f"got {value}, expected {context['expected']}" + nearest(
                str(detail["input"]), values
            )
    expected = (
        _EXPECTED.get(detail["type"])
        or detail["msg"].removeprefix("Input should be ").partition(", unable")[0]
    )
    return (
        f"got {value}, expected"
        f" {'a number ' if expected.startswith(('greater', 'less')) else ''}{expected}"
    )


def _unknown_key(key: str, holder: type[BaseModel], root: type[BaseModel]) -> str:
    """A key of that very name elsewhere is what was meant, first of all one below; else one here
    that resembles it.
    """
    valid = list(keys(holder))
    places = [(dotted((*path, key)), model) for path, model in walk(root) if key in keys(model)]
    below = {model for _, model in walk(holder)}
    near = [place for place, model in places if model in below] or [place for place, _ in places]
    moved = " and ".join(list(dict.fromkeys(near))[:3])
    hint = f"; it is a key of {moved}" if moved else nearest(key, valid)
    return (
        f"unknown key{hint}{'' if hint.endswith('?') else '.'} Keys here:"
        f" {', '.join(valid) or 'none'}"
    )


def short(value: Any, limit: int = 80) -> str:
    """The value as a message quotes it: its beginning when it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python shows no whole number of more than 4,300 digits
        text = f"{type(value).__name__} of too many digits to show"
    return text if len(text) <= limit else text[: limit - 3] + "..."
