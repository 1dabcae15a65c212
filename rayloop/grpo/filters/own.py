"""A filter of your own: a class with ``refused(group)``, or a function of a group, named by ``use``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rayloop.config.settings import Component, Role
from rayloop.core.failures import ConfigError, FilterBroken
from rayloop.core.groups import Group


class OwnFilter:
    """Builds the filter once, and checks what it returns."""

    def __init__(self, component: Component) -> None:
        self._use = component.use
        made = component.build()
        self._refused: Callable[[Group], Any] = made.refused if hasattr(made, "refused") else made

    def refused(self, group: Group) -> Mapping[int, str]:
        """Returns the filter's answer. Raises FilterBroken when it raises, refuses a member that is not kept, or lacks a reason."""
        try:
            found = dict(self._refused(group))
        except Exception as error:
            raise FilterBroken(
                f"the filter {self._use} raised on group {group.number} (task {group.task.id}): {type(error).__name__}: {error}"
            ) from error
        kept = {i for i, member in enumerate(group.members) if member.kept}
        wrong = {i: why for i, why in found.items() if i not in kept or not isinstance(why, str) or not why}
        if wrong:
            raise FilterBroken(
                f"the filter {self._use} refused {wrong!r:.200} of group {group.number}: return a mapping from positions of "
                f"kept members (here {sorted(kept)}) to a reason each"
            )
        return found


def _function(function: Callable[..., Any], use: str) -> None:
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if required[:1] != ["group"] or len(required) > 1:
        raise ConfigError(
            f"use: {use!r} is a function of ({', '.join(required)}), which is no filter. Write refused(group), which returns a "
            "mapping from positions in group.members to reasons"
        )


FILTER = Role("filter", ("refused",), _function)
