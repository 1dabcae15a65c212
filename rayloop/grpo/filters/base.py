"""The interface of filters: settings with a ``kind``, and the members of a group that it refuses. No torch, no ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rayloop.config.settings import SettingsModel
from rayloop.core.groups import Group, Member


class Filter(Protocol):
    """Takes members out of a group before it competes for a step (docs/algorithm.md, section 4)."""

    def refused(self, group: Group) -> Mapping[int, str]:
        """Position in ``group.members`` -> the reason under which it is counted (``filtered/<reason>``).

        Only of kept members; all of these are scored and have an advantage. Every filter sees the group as it was before the first
        one, so none depends on the place of another. It must not depend on anything but the group, nor change it.
        """
        ...


class MemberFilter(SettingsModel):
    """Base of filters that look at one member at a time; the reason is their ``kind``."""

    kind: str

    def keeps(self, member: Member) -> bool:
        """Whether ``member`` may be trained on."""
        raise NotImplementedError

    def refused(self, group: Group) -> Mapping[int, str]:
        """The kept members that ``keeps`` refuses."""
        return {i: self.kind for i, member in enumerate(group.members) if member.kept and not self.keeps(member)}
