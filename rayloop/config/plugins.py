"""Names that installed packages give to their components, by entry points."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from rayloop.core.failures import ConfigError, nearest

GROUPS = (
    "rayloop.environments",
    "rayloop.rewards",
    "rayloop.losses",
    "rayloop.filters",
    "rayloop.engines",
)
"""A package registers ``name = "package.module:Class"`` in one of these."""


def plugins() -> Mapping[str, list[EntryPoint]]:
    """Each registered name with its entry points: several where packages claim the same name."""
    by_name: dict[str, list[EntryPoint]] = {}
    for group in GROUPS:
        for point in entry_points(group=group):
            by_name.setdefault(point.name, []).append(point)
    return by_name


def place(use: str) -> str:
    """The ``package.module:Name`` that ``use`` means; ``use`` itself where it is one already.

    Raises ConfigError when no installed package registers the name, or several do for different
    places.
    """
    if ":" in use:
        return use
    known = plugins()
    places = {point.value: point for point in known.get(use, [])}
    if len(places) == 1:
        return next(iter(places))
    if places:
        claims = "; ".join(f"{_package(point)}: {value}" for value, point in places.items())
        raise ConfigError(
            f"use: {use!r} is the name of several plug-ins ({claims}). Write package.module:Name"
        )
    raise ConfigError(
        f"use: {use!r} is neither package.module:Name nor a plug-in of an installed"
        f" package{nearest(use, list(known))}"
    )


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"
