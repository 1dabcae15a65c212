"""Limits of alarms: where a value warns, and where it ends the run. Beyond a ``Limit`` is above it, beyond a ``Floor`` below."""

from __future__ import annotations

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel


class Limit(SettingsModel):
    """An alarm: where it warns, and where it ends the run. null: never."""

    warn: float | None = Field(None, ge=0)
    """Beyond this an event and a line on the terminal, once until it is well again. Change it when you know the reason."""
    stop: float | None = Field(None, ge=0)
    """Beyond this the run ends with exit code 1. Set it for runs that nobody watches."""

    @model_validator(mode="after")
    def _order(self) -> Limit:
        if self.warn is not None and self.stop is not None and self.stop < self.warn:
            raise ValueError(f"stop ({self.stop:g}) is below warn ({self.warn:g}): the run would end before it was told why")
        return self

    def warns(self, value: float) -> bool:
        return self.warn is not None and value > self.warn

    def stops(self, value: float) -> bool:
        return self.stop is not None and value > self.stop


class Floor(Limit):
    """An alarm about what falls: where it warns, and where it ends the run. null: never."""

    @model_validator(mode="after")
    def _order(self) -> Floor:
        if self.warn is not None and self.stop is not None and self.stop > self.warn:
            raise ValueError(f"stop ({self.stop:g}) is above warn ({self.warn:g}): the run would end before it was told why")
        return self

    def warns(self, value: float) -> bool:
        return self.warn is not None and value < self.warn

    def stops(self, value: float) -> bool:
        return self.stop is not None and value < self.stop


Alarm = tuple[float, Limit, str]
"""The value that is watched, its limits, and what it means in words."""
