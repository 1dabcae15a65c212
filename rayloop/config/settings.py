"""Configuration: strict settings classes, components by dotted name, and loading.

The errors name file and line.
"""

import copy
import functools
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from rayloop.config.explain import explain, take_texts
from rayloop.config.modules import folder_hint, module_in_file, remedy, similar_name
from rayloop.config.plugins import place
from rayloop.config.yaml_source import KeyPath, Source, change, dotted, read
from rayloop.core.failures import ConfigError


class SettingsModel(BaseModel):
    """Base of every settings class.

    Unknown keys are errors, numbers are finite unless a field allows more by name, values are
    immutable. The text below a field is its entry on the reference page.
    """

    # Without ``use_attribute_docstrings``, for which pydantic reads the source of every class at
    # each start of a process; ``tools.pages.settings`` reads the texts for the pages.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )

    _source: Source = PrivateAttr(default_factory=Source)

    @model_validator(mode="before")
    @classmethod
    def _add_default_use(cls, data: Any) -> Any:
        """Add the ``use`` of a component's default to a ``with`` that is set without it."""
        if not isinstance(data, Mapping):
            return data
        completed = dict(data)
        for name, info in cls.model_fields.items():
            if not isinstance(info.default, Component):
                continue
            value = data.get(name)
            if isinstance(value, Mapping) and "use" not in value:
                completed[name] = {**value, "use": info.default.use}
        return completed


def _local(text: str) -> str:
    if re.search(r"\$(\w|{)", text):
        raise ValueError(
            f"got {text!r}, but environment variables are not expanded here; write the path itself"
        )
    return os.path.expanduser(text)


LocalPath = Annotated[str, AfterValidator(_local)]
"""A path in a configuration, with the home folder for ``~``.

Relative paths stay relative (see ``local_path``).
"""


@dataclass(frozen=True)
class Role:
    """The demands on a component: ``Annotated[Component, Role(...)]``.

    ``methods``: its class has them. ``function`` receives a plain function and its dotted name and
    raises ConfigError for a wrong one; None: classes only.
    """

    name: str
    methods: tuple[str, ...]
    function: Callable[[Callable[..., Any], str], Any] | None = None

    def of(self, settings: BaseModel) -> "Role":
        """The component's role in these settings.

        It is this one, unless another value of the settings decides it.
        """
        return self

    def check(self, component: "Component") -> None:
        """Raise ConfigError when the component cannot play this role."""
        target = component.resolve()
        if isinstance(target, type):
            missing = [name for name in self.methods if not callable(getattr(target, name, None))]
            if missing:
                raise ConfigError(
                    f"use: {component.use!r} has no method {' and no '.join(missing)}, so it cannot"
                    f" be the {self.name}"
                )
        elif self.function is None:
            raise ConfigError(
                f"use: {component.use!r} is a function; the {self.name} must be a class"
            )
        else:
            self.function(component.build(), component.use)


def takes(parameter: str, role: str, remedy: str) -> Callable[[Callable[..., Any], str], None]:
    """``Role.function`` of roles whose functions take one argument, ``parameter``.

    ``remedy`` says what to write instead.
    """

    def check(function: Callable[..., Any], use: str) -> None:
        parameters = inspect.signature(function).parameters.values()
        required = [item.name for item in parameters if item.default is item.empty]
        if required != [parameter]:
            raise ConfigError(
                f"use: {use!r} is a function of ({', '.join(required)}), which cannot be the"
                f" {role}. {remedy}"
            )

    return check


_imports_foreign_code: ContextVar[bool] = ContextVar("imports_foreign_code", default=True)


class NotImported(ConfigError):
    """A component that is not shipped, where only shipped ones are imported."""


@contextmanager
def without_foreign_code() -> Iterator[None]:
    """In the block only components that this package ships are imported."""
    token = _imports_foreign_code.set(False)
    try:
        yield
    finally:
        _imports_foreign_code.reset(token)


class NoSettings(SettingsModel):
    """The settings of a component's class that has no ``Settings`` and takes no argument."""


class Component(SettingsModel):
    """A part of a recipe: ``{use: package.module:Class, with: {...}}``, or with a file's path.

    A path is written as ``path/to/file.py:name``. A class takes its nested ``Settings``, which
    validate ``with``, or nothing; a function takes ``with`` as keyword arguments.
    """

    use: str
    """Its address: ``package.module:Name``, or a plug-in's name.

    Modules are found in the current directory too. Why a key: a custom part, such as a company's
    logger or a paper's new loss, can only be named by its address.
    """
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Its own settings (docs/components.md lists the settings of the shipped ones).

    Why a key: two runs with the same component differ in them, for example in the weight that a
    reward gives to the format.
    """

    def resolve(self) -> Callable[..., Any]:
        """The class or function itself. Raises ConfigError when it does not exist or is neither."""
        module_name, _, name = place(self.use).rpartition(":")
        is_file = module_name.endswith(".py")
        is_shipped = module_name.startswith("rayloop.") and not is_file
        if not is_shipped and not _imports_foreign_code.get():
            raise NotImported(f"use: {self.use!r} is not imported")
        try:
            if is_file:
                module = module_in_file(local_path(module_name))
            else:
                module = importlib.import_module(module_name)
            target = getattr(module, name)
        # The module may be a user's own code, which can raise any error.
        except Exception as error:
            suggestion = similar_name(module_name, name, error)
            problem = f"{type(error).__name__}: {error}{suggestion}. {remedy(module_name, error)}"
            raise ConfigError(f"use: {self.use!r} cannot be loaded: {problem}") from error
        if not callable(target):
            raise ConfigError(
                f"use: {self.use!r} is neither class nor function, but {type(target).__name__}"
            )
        return target

    def settings_class(self) -> type[BaseModel] | None:
        """The class that validates ``with``: a class's Settings or NoSettings.

        None for a function. Raises ConfigError.
        """
        target = self.resolve()
        if not isinstance(target, type):
            return None
        model = getattr(target, "Settings", None)
        # Every class can be called: only a function named __call__ makes its instances callable.
        has_call = inspect.isfunction(getattr(target, "__call__", None))  # noqa: B004
        if model is None and not has_call and not inspect.signature(target).parameters:
            return NoSettings
        if isinstance(model, type) and issubclass(model, BaseModel):
            return model

        if model is None:
            problem = "has no nested Settings class"
        else:
            problem = "has a Settings class that is not a pydantic model"
        message = f"use: {self.use!r} {problem}, so it is not a component. {SETTINGS_ADVICE}"
        if has_call:
            message += (
                "\n    To have an instance called like a function, name one: f ="
                f" {target.__name__}(...)"
            )
        raise ConfigError(message)

    def options(self) -> BaseModel | None:
        """``with``, validated; None for a function.

        Raises ConfigError, pydantic.ValidationError.
        """
        model = self.settings_class()
        if model is not None:
            return model.model_validate(self.with_)
        try:
            inspect.signature(self.resolve()).bind_partial(**self.with_)
        except TypeError as error:
            raise ConfigError(
                f"use: {self.use!r} does not take the arguments in `with`: {error}"
            ) from error
        return None

    def build(self) -> Any:
        """An instance with its settings, or the function with its arguments.

        Raises ConfigError, pydantic.ValidationError.
        """
        target = self.resolve()
        options = self.options()
        if isinstance(options, NoSettings):
            return target()
        if options is not None:
            return target(options)
        return functools.partial(target, **self.with_) if self.with_ else target


CUSTOM = "a custom class (use)"
"""The tag of the Component in a union of settings: ``Annotated[Component, Tag(CUSTOM)]``."""


def by_kind(default: str) -> Discriminator:
    """Discriminates the members of a union by ``kind``.

    ``default`` is for a value without a kind, ``CUSTOM`` for one with a ``use``.
    """

    def tag(value: Any) -> str:
        if isinstance(value, Mapping):
            return CUSTOM if "use" in value else str(value.get("kind", default))
        return CUSTOM if isinstance(value, Component) else str(getattr(value, "kind", ""))

    return Discriminator(tag)


SETTINGS_ADVICE = (
    "Write in the class:\n"
    "      class Settings(rayloop.config.settings.SettingsModel): pass"
    "  # its fields are the keys of `with`\n"
    "      def __init__(self, settings): ..."
)


S = TypeVar("S", bound=SettingsModel)


def load(path: Path, overrides: Sequence[str], model: type[S], over: Sequence[Path] = ()) -> S:
    """The settings in ``path`` and the file that it ``extends``.

    Files ``over`` it are merged into it, then ``key.sub=value`` overrides. Paths and components
    stay as written. Raises ConfigError that lists every problem with file and line.
    """
    data, source = read(path, overrides, over)
    return _settings(model, data, source)


def changed(data: Mapping[str, Any], overrides: Sequence[str], model: type[S]) -> S:
    """The settings in plain ``data``, changed by ``key.sub=value``. Raises ConfigError."""
    copied = copy.deepcopy(dict(data))
    return _settings(model, copied, change(copied, overrides))


def _settings(model: type[S], data: dict[str, Any], source: Source) -> S:
    try:
        settings = _validated(model, data, source)
    except ValidationError as error:
        raise _error(explain(error, model, data, source), source) from error
    settings._source = source
    return settings


def _validated(model: type[S], data: dict[str, Any], source: Source) -> S:
    """``data`` as ``model``.

    Where a text is expected, a number counts as it was written, such as the id of a job as a name.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        if not take_texts(error, model, data, source):
            raise
        return _validated(model, data, source)


def check_components(settings: SettingsModel) -> None:
    """Import every component of ``settings`` and validate its ``with``.

    Raises ConfigError that lists every problem.
    """
    source = settings._source
    problems: list[str] = []
    for path, component, role in _components_with_roles(settings):
        problems += _component_problems(path, component, role, source)
    if problems:
        raise _error(problems, source)


def _component_problems(
    path: KeyPath, component: Component, role: Role | None, source: Source
) -> list[str]:
    try:
        component.options()
        if role is not None:
            role.check(component)
    except NotImported:
        return []
    except ConfigError as error:
        hint = ""
        if isinstance(error.__cause__, ModuleNotFoundError):
            hint = folder_hint(component.use, source)
        return [f"{source.where((*path, 'use'))}: {dotted(path)}: {error}{hint}"]
    except ValidationError as error:
        model = component.settings_class() or SettingsModel
        return explain(error, model, component.with_, source, (*path, "with"))
    return []


def components(settings: BaseModel, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Component]]:
    """Every component of ``settings`` with its path.

    The components in another component's own settings are included when these are valid.
    """
    for path, component, _ in _components_with_roles(settings, prefix):
        yield path, component


def dump(settings: SettingsModel, *, expand_components: bool = False) -> str:
    """The configuration with every default, as YAML that loads to an equal object.

    ``expand_components`` writes the defaults of each component under its ``with`` too. Raises
    ConfigError when a component cannot be loaded.
    """
    data = settings.model_dump(mode="json", by_alias=True)
    if expand_components:
        check_components(settings)
        for path, component in components(settings):
            options = component.options()
            if options is None:
                continue
            node: Any = data
            for key in path:
                node = node[key]
            node["with"] = options.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def local_path(text: str) -> Path:
    """A path of the configuration as an absolute one.

    It starts from the current directory of this process; ``~`` is the home folder.
    """
    return Path(text).expanduser().absolute()


ComponentWithRole = tuple[KeyPath, Component, Role | None]


def _components_with_roles(
    settings: BaseModel, prefix: KeyPath = ()
) -> Iterator[ComponentWithRole]:
    for name, info in type(settings).model_fields.items():
        role = next((part for part in info.metadata if isinstance(part, Role)), None)
        if role is not None:
            role = role.of(settings)
        path = (*prefix, info.alias or name)
        yield from _components_in(settings.__dict__[name], path, role)


def _components_in(
    value: Any, path: KeyPath, role: Role | None = None
) -> Iterator[ComponentWithRole]:
    if isinstance(value, Component):
        yield path, value, role
        try:
            options = value.options()
        # ``check_components`` reports it for the component itself.
        except (ConfigError, ValidationError):
            return
        if options is not None:
            yield from _components_with_roles(options, (*path, "with"))
    elif isinstance(value, BaseModel):
        yield from _components_with_roles(value, path)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _components_in(part, (*path, key), role)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _components_in(part, (*path, index), role)


def _error(problems: Sequence[str], source: Source) -> ConfigError:
    # Without a file, all values come from the command line.
    if source.file == os.devnull:
        return ConfigError("; ".join(problems))
    count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
    origin = source.file or "the configuration"
    lines = [f"{origin} has {count}:", *(f"  {problem}" for problem in problems)]
    return ConfigError("\n".join(lines))
