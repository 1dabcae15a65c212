"""Keys that once were settings: refused with what replaced them, and accepted where they say what holds anyway.

A settings class lists its own in ``removed``. A run's ``config.yaml`` and the configuration in its checkpoints were written in
full by the version that began the run: what they say of such a key is the old default, mostly, and then nothing has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, model_validator


@dataclass(frozen=True)
class Removed:
    """A key that is gone: the value that it had by default and that holds since, and a clause that says what to do instead."""

    value: Any
    instead: str

    def __str__(self) -> str:
        return f"no key any more (was {json.dumps(self.value)} by default): {self.instead}. Leave it out"


class Remembering(BaseModel):
    """A settings class that knows the keys it once had."""

    removed: ClassVar[Mapping[str, Removed]] = {}

    @model_validator(mode="before")
    @classmethod
    def _said_anyway(cls, data: Any) -> Any:
        """Leave out what says of a removed key that it is as it always is."""
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if key not in cls.removed or value != cls.removed[key].value}


def removed_from(model: type[BaseModel]) -> Mapping[str, Removed]:
    """The keys that a settings class once had."""
    return model.removed if issubclass(model, Remembering) else {}


def removed_below(each: Iterator[tuple[tuple[str | int, ...], type[BaseModel]]]) -> dict[str, Any]:
    """Dotted key -> the value that holds since, of all keys removed from the classes of ``explain.walk``."""
    return {".".join(map(str, (*path, key))): gone.value for path, model in each for key, gone in removed_from(model).items()}
