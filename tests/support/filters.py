"""A filter for tests with real runs: the first member of each group goes."""

from __future__ import annotations

from rayloop.core.groups import Group


def first(group: Group) -> dict[int, str]:
    return {0: "first"} if group.members[0].kept else {}
