"""Conversion of a reward source's results to outcomes: NaN, infinity and texts are never rewards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice
from typing import Any

from rayloop.core.groups import Outcome, Scored, Unscored, UnscoredKind


def as_outcome(result: Any) -> Outcome:
    """The outcome of one result: an Outcome, or any value that ``float`` makes a finite number (a bool, a scalar of numpy, a tensor
    without dimensions). Anything else, texts included, is an invalid reward.

    Components that are no finite numbers are dropped and flagged ``invalid_component``.
    """
    if isinstance(result, Unscored):
        return result
    scored = result if isinstance(result, Scored) else Scored(result)
    value = _number(scored.value)
    if value is None:
        why = f"the reward source returned {scored.value!r:.200}, not a finite number"
        return Unscored(UnscoredKind.INVALID_REWARD, why, why)
    given = {str(name): _number(value) for name, value in scored.components.items()}
    components = {name: number for name, number in given.items() if number is not None}
    dropped = ("invalid_component",) if len(components) < len(scored.components) else ()
    return Scored(value, components, (*map(str, scored.flags), *dropped))


def _number(value: Any) -> float | None:
    """``float(value)`` if that is finite, else None. Arrays and tensors must be without dimensions."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if isinstance(value, str | bytes | bytearray) or getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_outcomes(result: Any, count: int) -> list[Outcome]:
    """The outcomes of a result for ``count`` trajectories, each element by ``as_outcome``.

    Raises TypeError for a result without elements (or a generator, which would run here), ValueError for another number of them.
    """
    found = None if isinstance(result, Iterator) else elements(result, count + 1)
    if found is None:
        raise TypeError(f"a list of {count} outcomes was expected, one per trajectory, not {result!r:.200}")
    if len(found) != count:
        raise ValueError(f"{count} outcomes were expected, one per trajectory, not {len(found) if len(found) < count else 'more'}")
    return [as_outcome(one) for one in found]


def elements(result: Any, most: int) -> list[Any] | None:
    """The first ``most`` elements of a list, an array, a tensor or a generator; None for any other value."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | Mapping | Set):
        return None
    return None if getattr(result, "shape", None) == () else list(islice(result, most))
