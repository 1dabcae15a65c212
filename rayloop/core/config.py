"""Configuration: strict settings classes, components by dotted name, and loading with errors that give file and line."""

from __future__ import annotations

import importlib
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rayloop.core.failures import ConfigError


class Settings(BaseModel):
    """Base of every settings class: unknown keys are errors, values are immutable, field docstrings are the reference."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True)


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
