"""Limits of alarms: the value that warns, and the value that ends the run. ``Limit`` bounds from above, ``Floor`` from below."""

from __future__ import annotations

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel


class Limit(SettingsModel):
    """An alarm: where it warns, and where it ends the run. null: never."""

    warn: float | None = Field(None, ge=0)
    """Beyond this the run emits an event and prints a line, once until the value is back. Change it when you know the reason."""
    stop: float | None = Field(None, ge=0)
    """Beyond this the run ends with exit code 1. Set it for unattended runs."""

    @model_validator(mode="after")
    def _order(self) -> Limit:
        if self.warn is not None and self.stop is not None and self._beyond(self.warn, self.stop):
            side = "above" if isinstance(self, Floor) else "below"
            raise ValueError(f"stop ({self.stop:g}) is {side} warn ({self.warn:g}): the run would end before it warned")
        return self

    def warns(self, value: float) -> bool:
        """Whether ``value`` is an alarm."""
        return self.warn is not None and self._beyond(value, self.warn)

    def stops(self, value: float) -> bool:
        """Whether ``value`` ends the run."""
        return self.stop is not None and self._beyond(value, self.stop)

    def _beyond(self, value: float, bound: float) -> bool:
        return value > bound


class Floor(Limit):
    """An alarm for a value that falls: where it warns, and where it ends the run. null: never."""

    def _beyond(self, value: float, bound: float) -> bool:
        return value < bound


Alarm = tuple[float, Limit, str]
"""The watched value, its limits, and a sentence that says what the value means."""
