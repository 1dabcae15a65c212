"""Configuration: strict settings classes, components by dotted name and loading with errors that name file and line."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from rayloop.core.failures import ConfigError
from rayloop.core.schema import explain
from rayloop.core.yaml_source import KeyPath, Source, dotted, read


class Settings(BaseModel):
    """Base of every settings class: unknown keys are errors, values are immutable, docstrings are the reference."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True)

    _source: Source = PrivateAttr(default_factory=Source)


class Component(Settings):
    """A part of a recipe: ``{use: package.module:Class, with: {...}}``.

    The class has a nested ``Settings`` class, which validates ``with``, and takes an instance of it as only argument.
    """

    use: str
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")

    def resolve(self) -> type[Any]:
        """The class itself. Raises ConfigError when module or class do not exist."""
        module, _, name = self.use.partition(":")
        try:
            return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"use: {self.use!r} cannot be loaded: {error}. Expected package.module:Class") from error

    def build(self) -> Any:
        """An instance made from the validated settings. Raises ConfigError, pydantic.ValidationError."""
        cls = self.resolve()
        return cls(cls.Settings.model_validate(self.with_))


S = TypeVar("S", bound=Settings)


def load(path: Path, overrides: Sequence[str], model: type[S]) -> S:
    """Read ``path`` (and what it ``extends``), apply ``key.sub=value`` overrides, validate as ``model``.

    Raises ConfigError that lists every problem with file and line. Paths inside the configuration are left as written
    (see ``local_path``). Components are checked by ``check_components``, since that imports them.
    """
    data, source = read(path, overrides)
    try:
        settings = model.model_validate(data)
    except ValidationError as error:
        raise _refused(explain(error, model, data, source), source) from error
    settings._source = source
    return settings


def check_components(settings: Settings) -> None:
    """Import every component of ``settings`` and validate its ``with``. Raises ConfigError that lists every problem."""
    source = settings._source
    problems = []
    for path, component in components(settings):
        try:
            _options(component)
        except ConfigError as error:
            problems.append(f"{source.where((*path, 'use'))}: {dotted(path)}: {error}")
        except ValidationError as error:
            model = component.resolve().Settings
            problems += explain(error, model, component.with_, source, (*path, "with"))
    if problems:
        raise _refused(problems, source)


def components(settings: BaseModel, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Component]]:
    """Every component of ``settings`` with its path, those inside a component's own settings included when valid."""
    for name, info in type(settings).model_fields.items():
        yield from _components_in(settings.__dict__[name], (*prefix, info.alias or name))


def dump(settings: Settings, *, expand_components: bool = False) -> str:
    """The configuration with every default written out, as YAML that loads to an equal object.

    With ``expand_components`` the defaults of each component's own settings appear under its ``with`` as well, which
    describes the same run. Raises ConfigError when a component cannot be loaded.
    """
    data = settings.model_dump(mode="json", by_alias=True)
    if expand_components:
        check_components(settings)
        for path, component in components(settings):
            place: Any = data
            for key in path:
                place = place[key]
            place["with"] = _options(component).model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def local_path(text: str) -> Path:
    """A path of the configuration as an absolute one. ``~`` is the home folder.

    Relative paths are relative to the current directory of the process that reads the configuration, like every path
    on a command line, and not to the YAML file: a preset that extends another from elsewhere keeps its meaning.
    """
    return Path(text).expanduser().absolute()


def _options(component: Component) -> BaseModel:
    """The component's validated settings. Raises ConfigError, pydantic.ValidationError."""
    cls = component.resolve()
    try:
        model = cls.Settings
    except AttributeError as error:
        raise ConfigError(f"use: {component.use!r} has no nested Settings class, so it is no component") from error
    options: BaseModel = model.model_validate(component.with_)
    return options


def _components_in(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Component]]:
    if isinstance(value, Component):
        yield path, value
        try:
            inner = _options(value)
        except (ConfigError, ValidationError):
            return  # reported by check_components at the component itself
        yield from components(inner, (*path, "with"))
    elif isinstance(value, BaseModel):
        yield from components(value, path)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _components_in(part, (*path, key))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _components_in(part, (*path, index))


def _refused(problems: Sequence[str], source: Source) -> ConfigError:
    many = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
    origin = source.file or "the configuration"
    return ConfigError(f"{origin} has {many}:\n" + "\n".join(f"  {problem}" for problem in problems))
