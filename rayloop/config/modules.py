"""Modules that a configuration names with ``use``: their import, and advice when it fails."""

import hashlib
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from rayloop.config.yaml_source import Source
from rayloop.core.failures import nearest

_DIGEST_CHARACTERS = 8


def module_in_file(file: Path) -> ModuleType:
    """The module in a Python file, under a unique name, loaded once per process."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    name = f"{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    # Before the execution, as for every import: dataclasses look their module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    # The module may have replaced itself.
    return sys.modules[name]


def remedy(module: str, error: Exception) -> str:
    """Advice about a module that cannot be imported."""
    expected = "Expected package.module:Class"
    if not isinstance(error, ModuleNotFoundError):
        return expected
    here = Path.cwd()
    package = module.partition(".")[0]
    if error.name == package:
        return (
            f"Modules are looked for in the current directory, {here}, and among the installed"
            " packages"
        )
    paths = getattr(sys.modules.get(package), "__path__", ())
    folders = [Path(path).resolve() for path in paths]
    folder = here / package
    if folders and folder.is_dir() and folder not in folders:
        return f"{folder} is hidden by the package {package} in {folders[0]}; rename yours"
    if error.name and not _is_within(module, error.name):
        by_path = ""
        if module.endswith(".py"):
            by_path = ", and a file given by its path finds none in the file's folder"
        return f"{module} imports {error.name}, which is neither installed nor in {here}{by_path}"
    return expected


def similar_name(module: str, name: str, error: Exception) -> str:
    """``; did you mean `x`?`` with the nearest name, "" without one.

    The name is one in the module, or that of a module in its package when the module is missing.
    """
    if isinstance(error, ModuleNotFoundError) and error.name and _is_within(module, error.name):
        package, _, name = error.name.rpartition(".")
        paths = getattr(sys.modules.get(package), "__path__", [])
        names = [info.name for info in pkgutil.iter_modules(paths)]
    elif _lacks_name(error, name):
        names = [key for key, value in vars(error.obj).items() if callable(value)]
    else:
        return ""
    return nearest(name, names).removesuffix("?")


def _is_within(module: str, package: str) -> bool:
    """Whether a module is the package, or below it."""
    return f"{module}.".startswith(f"{package}.")


def _lacks_name(error: Exception, name: str) -> TypeGuard[AttributeError]:
    """Whether a module was found, and has no such name."""
    if not isinstance(error, AttributeError):
        return False
    return isinstance(error.obj, ModuleType) and error.name == name


def folder_hint(use: str, source: Source) -> str:
    """Where to run the command when the module is next to the configuration; "" otherwise.

    Modules are not searched for there.
    """
    folder = Path(os.path.abspath(source.file)).parent
    package = use.partition(":")[0].partition(".")[0]
    is_there = (folder / package).exists() or (folder / f"{package}.py").exists()
    if folder == Path.cwd() or not is_there:
        return ""
    return f". {package} is next to the configuration: run the command in {folder}"
