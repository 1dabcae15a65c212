"""Which language a model speaks, and how the parts of a configuration get it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pydantic import BaseModel, model_validator

from rayloop.config.settings import Component, SettingsModel
from rayloop.config.yaml_source import KeyPath, dotted
from rayloop.core.failures import ConfigError
from rayloop.envs.grammar.family import (
    ANY_MODEL,
    AUTO,
    LanguageChoice,
    listeners,
    longest_name,
    settings_of,
)
from rayloop.envs.grammar.language import action_format, names

S = TypeVar("S", bound=SettingsModel)


class OriginalSpeaks(SettingsModel):
    """Settings with a ``variant`` and a ``language``: ARPO's own reading of turns has one."""

    @model_validator(mode="after")
    def _original_in_its_language(self) -> Self:
        values = self.__dict__
        if values["variant"] == "original" and values["language"] != ANY_MODEL:
            raise ValueError(
                f"variant: original reads turns by ARPO's rules, and these belong to {ANY_MODEL}."
                f" Set environment.language to {ANY_MODEL}, or variant to corrected"
            )
        return self


@dataclass(frozen=True)
class Model:
    """The properties of a model that decide its language.

    ``path``: its folder or its name on the Hub; ``described``: its config.json.
    """

    path: str
    described: Mapping[str, Any]

    @property
    def type(self) -> str:
        """Return the ``model_type``."""
        return str(self.described.get("model_type", ""))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the last parts of its path and of the name in config.json."""
        paths = (self.path, str(self.described.get("_name_or_path", "")))
        return tuple(path.rstrip("/").rpartition("/")[2] for path in paths if path)


def native(model: Model) -> tuple[str, bool]:
    """Return the model's language, "" for a model that no file has, and whether its name says so.

    The longest name counts; without one the type's default.
    """
    by_name = ("", 0)
    by_type = ""
    for language in map(action_format, names()):
        for entry in language.models:
            if model.type not in entry.types:
                continue
            length = longest_name(entry, model.names)
            if length > by_name[1]:
                by_name = (language.family, length)
            if entry.default:
                by_type = language.family
    name, length = by_name
    return (name, True) if length else (by_type, False)


def chosen(choice: LanguageChoice, model: Model, key: str) -> LanguageChoice:
    """Return the language of ``choice``, which ``key`` set, for a model.

    Raises ConfigError when ``auto`` finds none, and when the two disagree. Any model may learn
    UI-TARS's language and one that is an environment's own; a file and a class of the user's are
    taken as they are.
    """
    if isinstance(choice, Component) or choice.endswith((".yaml", ".yml")):
        return choice
    own, is_named = native(model)
    if choice == AUTO:
        if own:
            return own
        raise ConfigError(
            f"{key} is auto, and no language is known of {model.path}, a {model.type or 'model'}."
            f" Set {key} to {ANY_MODEL}, which any model may learn, or to one of"
            f" {', '.join(names())} (docs/compatibility.md)"
        )
    if choice not in names():
        raise ConfigError(f"{key}: {choice!r} is not a language; there are {', '.join(names())}")
    language = action_format(choice)
    if choice in (own, ANY_MODEL) or not language.models or not own:
        return choice
    # A base model may be trained on the language of a model that builds on it.
    is_base = any(entry.default for entry in action_format(own).models)
    if language.of_models(model.type) is not None and (is_base or not is_named):
        return choice
    raise ConfigError(
        f"{key} is {choice}, but {model.path} is a {model.type} that was trained on {own}: its own"
        f" turns would be mistakes. Set {key} to auto or {own}, or to {ANY_MODEL}, which any model"
        " may learn"
    )


def spoken(settings: S, language: LanguageChoice, model: Model, key: str) -> S:
    """Return settings whose components have the language, and point as the model does.

    ``key`` set the language. Raises ConfigError for a component that has another one.
    """
    written: Any = language
    if isinstance(language, Component):
        written = language.model_dump(by_alias=True)
    pointing = _pointing(language, model)
    for path, component in listeners(settings):
        given = component.with_.get("language", written)
        if given != written:
            where = dotted((*path, "with", "language"))
            raise ConfigError(
                f"{where} is {given}, and {key} is {written}: all parts of a run have the language"
                f" of its model. Leave {where} out, and set {key} to {given} if the model speaks it"
            )
        options = {**component.with_, "language": written}
        points = options.get("pointing", {})
        if pointing and "pointing" in settings_of(component) and isinstance(points, Mapping):
            options["pointing"] = {**pointing, **points}
        settings = _put(settings, (*path, "with"), options)
    return settings


def _pointing(language: LanguageChoice, model: Model) -> Mapping[str, Any]:
    """Return how the model points where it differs from others that speak the language."""
    if isinstance(language, Component):
        return {}
    entry = action_format(language).of_models(model.type, *model.names)
    return entry.pointing if entry else {}


def _put(value: Any, path: KeyPath, new: Any) -> Any:
    """Return ``value`` with something new at a path of keys; the value itself stays."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        name = next(name for name, info in fields.items() if key in (name, info.alias))
        inner = _put(getattr(value, name), tuple(rest), new)
        return value.model_copy(update={name: inner})
    if isinstance(value, list | tuple):
        copy = list(value)
        copy[int(key)] = _put(copy[int(key)], tuple(rest), new)
        return type(value)(copy)
    inner = value.get(key, {}) if isinstance(value, Mapping) else {}
    return {**value, key: _put(inner, tuple(rest), new)}
