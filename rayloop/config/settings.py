"""Configuration: strict settings classes, components by dotted name and loading with errors that
name file and line.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
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
from rayloop.config.plugins import place
from rayloop.config.yaml_source import KeyPath, Source, dotted, read
from rayloop.core.failures import ConfigError, nearest


class SettingsModel(BaseModel):
    """Base of every settings class: unknown keys are errors, numbers are finite unless a field
    allows more by name, values are immutable, docstrings are the reference.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )

    _source: Source = PrivateAttr(default_factory=Source)

    @model_validator(mode="before")
    @classmethod
    def _of_the_default(cls, data: Any) -> Any:
        """Where a component has a default, its ``with`` can be set without repeating its ``use``."""
        if not isinstance(data, Mapping):
            return data
        defaults = {
            name: info.default
            for name, info in cls.model_fields.items()
            if isinstance(info.default, Component)
        }
        partial = {
            name: data[name]
            for name in defaults
            if isinstance(data.get(name), Mapping) and "use" not in data[name]
        }
        return {
            **data,
            **{name: {**given, "use": defaults[name].use} for name, given in partial.items()},
        }


def _local(text: str) -> str:
    if re.search(r"\$(\w|{)", text):
        raise ValueError(
            f"got {text!r}, but environment variables are not expanded here; write the path itself"
        )
    return os.path.expanduser(text)


LocalPath = Annotated[str, AfterValidator(_local)]
"""A path in a configuration, with the home folder for ``~``; relative paths stay relative (see
``local_path``).
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
        """The role where the component stands in these settings: the same, unless another of their
        values decides it.
        """
        return self

    def check(self, component: "Component") -> None:
        """Raises ConfigError when the component cannot play this role."""
        found = component.resolve()
        if isinstance(found, type):
            missing = [name for name in self.methods if not callable(getattr(found, name, None))]
            if missing:
                raise ConfigError(
                    f"use: {component.use!r} has no method {' and no '.join(missing)}, so it is no"
                    f" {self.name}"
                )
        elif self.function is None:
            raise ConfigError(
                f"use: {component.use!r} is a function; the {self.name} must be a class"
            )
        else:
            self.function(component.build(), component.use)


def takes(parameter: str, role: str, remedy: str) -> Callable[[Callable[..., Any], str], None]:
    """``Role.function`` of roles whose functions take one argument, ``parameter``; ``remedy``: what
    to write instead.
    """

    def check(function: Callable[..., Any], use: str) -> None:
        required = [
            p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty
        ]
        if required != [parameter]:
            raise ConfigError(
                f"use: {use!r} is a function of ({', '.join(required)}), which is no {role}."
                f" {remedy}"
            )

    return check


_imports: ContextVar[bool] = ContextVar("imports", default=True)


class NotImported(ConfigError):
    """A component that is not shipped, where only shipped ones are imported."""


@contextmanager
def without_foreign_code() -> Iterator[None]:
    """Nothing that a configuration names with ``use`` is imported in the block, but what this
    package ships.
    """
    token = _imports.set(False)
    try:
        yield
    finally:
        _imports.reset(token)


class NoSettings(SettingsModel):
    """Of a component's class that has no ``Settings`` and takes no argument."""


class Component(SettingsModel):
    """A part of a recipe: ``{use: package.module:Class, with: {...}}``, or
    ``path/to/file.py:name``. A class takes its nested ``Settings``, which validate ``with``, or
    nothing; a function takes ``with`` as keyword arguments.
    """

    use: str
    """``package.module:Name``, found in the current directory too, or a plug-in's name."""
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")
    """Its own settings (docs/components.md has those of the shipped ones)."""

    def resolve(self) -> Callable[..., Any]:
        """The class or function itself. Raises ConfigError when it does not exist or is neither."""
        module, _, name = place(self.use).rpartition(":")
        if not _imports.get() and (module.endswith(".py") or not module.startswith("rayloop.")):
            raise NotImported(f"use: {self.use!r} is not imported")
        try:
            found = getattr(
                _from_file(module) if module.endswith(".py") else importlib.import_module(module),
                name,
            )
        except Exception as error:  # the module is a person's own code
            what = (
                f"{type(error).__name__}: {error}{_similar(module, name, error)}."
                f" {_remedy(module, error)}"
            )
            raise ConfigError(f"use: {self.use!r} cannot be loaded: {what}") from error
        if not callable(found):
            raise ConfigError(
                f"use: {self.use!r} is neither class nor function, but {type(found).__name__}"
            )
        return found

    def settings_class(self) -> type[BaseModel] | None:
        """The class that validates ``with``: a class's Settings, else NoSettings; None for a
        function. Raises ConfigError.
        """
        found = self.resolve()
        if not isinstance(found, type):
            return None
        model = getattr(found, "Settings", None)
        called = inspect.isfunction(getattr(found, "__call__", None))  # noqa: B004 (every class can be called)
        if model is None and not called and not inspect.signature(found).parameters:
            return NoSettings
        if isinstance(model, type) and issubclass(model, BaseModel):
            return model
        what = (
            "has no nested Settings class"
            if model is None
            else "has a Settings class that is no pydantic model"
        )
        instance = (
            f"\n    To have an instance called like a function, name one: f = {found.__name__}(...)"
            if called
            else ""
        )
        raise ConfigError(
            f"use: {self.use!r} {what}, so it is no component. {SETTINGS_ADVICE}{instance}"
        )

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
                f"use: {self.use!r} does not take what stands in `with`: {error}"
            ) from error
        return None

    def build(self) -> Any:
        """An instance with its settings, or the function with its arguments.

        Raises ConfigError, pydantic.ValidationError.
        """
        found, options = self.resolve(), self.options()
        if isinstance(options, NoSettings):
            return found()
        if options is not None:
            return found(options)
        return functools.partial(found, **self.with_) if self.with_ else found


OWN = "a class of your own (use)"
"""The tag of the Component in a union of settings: ``Annotated[Component, Tag(OWN)]``."""


def by_kind(default: str) -> Discriminator:
    """Discriminates the members of a union: by ``kind``, ``default`` without one, or ``OWN`` where
    there is a ``use``.
    """

    def which(value: Any) -> str:
        if isinstance(value, Mapping):
            return OWN if "use" in value else str(value.get("kind", default))
        return OWN if isinstance(value, Component) else str(getattr(value, "kind", ""))

    return Discriminator(which)


SETTINGS_ADVICE = """Write in the class:
      class Settings(rayloop.config.settings.SettingsModel): pass  # its fields are the keys of `with`
      def __init__(self, settings): ..."""


def _remedy(module: str, error: Exception) -> str:
    """What to do about a module that cannot be imported."""
    first, here = module.partition(".")[0], Path.cwd()
    if isinstance(error, ModuleNotFoundError) and error.name == first:
        return (
            f"Modules are looked for in the current directory, {here}, and among the installed"
            " packages"
        )
    known = [Path(path).resolve() for path in getattr(sys.modules.get(first), "__path__", ())]
    if (
        isinstance(error, ModuleNotFoundError)
        and known
        and (here / first).is_dir()
        and here / first not in known
    ):
        return f"{here / first} is hidden by the package {first} in {known[0]}; rename yours"
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and not f"{module}.".startswith(f"{error.name}.")
    ):
        alone = (
            ", and a file given by its path finds none that lies beside it"
            if module.endswith(".py")
            else ""
        )
        return f"{module} imports {error.name}, which is neither installed nor in {here}{alone}"
    return "Expected package.module:Class"


def _similar(module: str, name: str, error: Exception) -> str:
    """``; did you mean `x`?`` with the nearest name in the module, or the nearest module in its
    package; else "".
    """
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and f"{module}.".startswith(f"{error.name}.")
    ):
        package, _, name = error.name.rpartition(".")
        known = [
            found.name
            for found in pkgutil.iter_modules(getattr(sys.modules.get(package), "__path__", []))
        ]
    elif (
        isinstance(error, AttributeError)
        and isinstance(error.obj, ModuleType)
        and error.name == name
    ):
        known = [key for key, value in vars(error.obj).items() if callable(value)]
    else:
        return ""
    return nearest(name, known).removesuffix("?")


def _beside(use: str, source: Source) -> str:
    """Where to run the command when the module lies beside the configuration, and is not looked for
    there; else "".
    """
    folder, first = (
        Path(os.path.abspath(source.file)).parent,
        use.partition(":")[0].partition(".")[0],
    )
    if folder == Path.cwd() or not any((folder / name).exists() for name in (first, f"{first}.py")):
        return ""
    return f". {first} lies beside the configuration: run the command in {folder}"


def _from_file(path: str) -> ModuleType:
    """The module in a Python file, under a name of its own, loaded once per process."""
    file = local_path(path)
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python module")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


S = TypeVar("S", bound=SettingsModel)


def load(path: Path, overrides: Sequence[str], model: type[S], over: Sequence[Path] = ()) -> S:
    """Read ``path`` (and what it ``extends``), lay files ``over`` it, apply ``key.sub=value``
    overrides, validate as ``model``. Paths and components stay as written. Raises ConfigError that
    lists every problem with file and line.
    """
    data, source = read(path, overrides, over)
    try:
        settings = _validated(model, data, source)
    except ValidationError as error:
        raise _refused(explain(error, model, data, source), source) from error
    settings._source = source
    return settings


def _validated(model: type[S], data: dict[str, Any], source: Source) -> S:
    """``data`` as ``model``; where a text is expected, a number counts as it was written, such as
    the id of a job as a name.
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
    problems = []
    for path, component, role in _with_roles(settings):
        try:
            component.options()
            if role is not None:
                role.check(component)
        except NotImported:
            continue
        except ConfigError as error:
            hint = (
                _beside(component.use, source)
                if isinstance(error.__cause__, ModuleNotFoundError)
                else ""
            )
            problems.append(f"{source.where((*path, 'use'))}: {dotted(path)}: {error}{hint}")
        except ValidationError as error:
            problems += explain(
                error,
                component.settings_class() or SettingsModel,
                component.with_,
                source,
                (*path, "with"),
            )
    if problems:
        raise _refused(problems, source)


def components(settings: BaseModel, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Component]]:
    """Every component of ``settings`` with its path, those inside a component's own settings
    included when valid.
    """
    for path, component, _ in _with_roles(settings, prefix):
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
            place: Any = data
            for key in path:
                place = place[key]
            if (options := component.options()) is not None:
                place["with"] = options.model_dump(mode="json", by_alias=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def local_path(text: str) -> Path:
    """A path of the configuration as an absolute one, from the current directory of this process;
    ``~`` is the home folder.
    """
    return Path(text).expanduser().absolute()


Found = tuple[KeyPath, Component, Role | None]


def _with_roles(settings: BaseModel, prefix: KeyPath = ()) -> Iterator[Found]:
    for name, info in type(settings).model_fields.items():
        role = next((part for part in info.metadata if isinstance(part, Role)), None)
        here = None if role is None else role.of(settings)
        yield from _components_in(settings.__dict__[name], (*prefix, info.alias or name), here)


def _components_in(value: Any, path: KeyPath, role: Role | None = None) -> Iterator[Found]:
    if isinstance(value, Component):
        yield path, value, role
        try:
            inner = value.options()
        except (ConfigError, ValidationError):
            return  # reported by check_components at the component itself
        if inner is not None:
            yield from _with_roles(inner, (*path, "with"))
    elif isinstance(value, BaseModel):
        yield from _with_roles(value, path)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _components_in(part, (*path, key), role)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _components_in(part, (*path, index), role)


def _refused(problems: Sequence[str], source: Source) -> ConfigError:
    if source.file == os.devnull:  # all values come from the command line
        return ConfigError("; ".join(problems))
    many = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
    origin = source.file or "the configuration"
    return ConfigError(
        f"{origin} has {many}:\n" + "\n".join(f"  {problem}" for problem in problems)
    )
