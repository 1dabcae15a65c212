"""Marks for what needs a published package that only the lane ``make test-adapters`` installs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

PACKAGES = {
    "rayloop.envs.adapters.mcp": "mcp",
    "rayloop.envs.adapters.openenv": "websockets",
    "rayloop.envs.adapters.reasoning_gym": "reasoning_gym",
    "rayloop.envs.adapters.textarena": "textarena",
}
"""Module of ours -> the package that it needs."""


def package_marks(use: str) -> list[pytest.MarkDecorator]:
    """The marks of ``module:Class``: none, unless its module needs such a package."""
    package = PACKAGES.get(use.partition(":")[0])
    if package is None:
        return []
    return [
        pytest.mark.adapters,
        pytest.mark.skipif(
            find_spec(package) is None, reason=f"{package}: make test-adapters installs it"
        ),
    ]
