"""Saved completions, and how a recipe scores them without a run: ``SCORING`` in its module
``score``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayloop.config.explain import short
from rayloop.core.failures import DataFailure
from rayloop.core.types import EndReason, ImageRef, Sampling, Task, Trajectory, TrajectoryId, Turn

TEXTS = (
    "completion",
    "completions",
    "response",
    "solution_str",
    "texts",
    "text",
    "turns",
    "messages",
)
"""Columns of completions, of which the first one in a row counts: a text, a list of texts (one per
turn), messages (the assistant's count), or the turns of a run's ``rollouts`` (the sampled ones
count).
"""

PLAYED = Trajectory(TrajectoryId(0, 0), 0, "", 0, (), Sampling(), EndReason.DONE)
"""The trajectory of a saved completion, whose tokens are unknown."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One completion: the texts of the sampled turns, the task with the truth, the row's other data
    of the episode (``trajectory``), and the training step that the reward assumes.
    """

    texts: tuple[str, ...]
    task: Task
    row: Mapping[str, Any]
    trajectory: Trajectory = PLAYED
    step: int = 0


@dataclass(frozen=True, slots=True)
class OfflineScoring:
    """How a recipe's rewards are computed without a run.

    ``use`` is the reward's class. ``settings`` makes its ``with`` from a variant and the one wanted
    component (None: all). ``rewards`` are the components, ``aliases`` other names of them. ``read``
    makes a ``Saved`` from a row and its place, and raises DataFailure. ``answer`` is the answer
    that a variant reads. ``notes`` are last lines about all rows together, such as a comparison
    with columns of the file. ``others``: the class of a variant that is another reward than
    ``use``.
    """

    use: str
    variants: tuple[str, ...]
    rewards: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str], Saved]
    answer: Callable[[Saved, str], str | None] = lambda saved, variant: (
        saved.texts[-1].strip() or None
    )
    settings: Callable[[str, str | None], dict[str, Any]] = lambda variant, reward: {
        "variant": variant
    }
    aliases: Mapping[str, str] = field(default_factory=dict)
    notes: Callable[[Sequence[Saved], str], Sequence[str]] = lambda saved, variant: ()
    others: Mapping[str, str] = field(default_factory=dict)


def name_of(row: Mapping[str, Any], where: str) -> str:
    """The row's ``id``, else the task of a line of ``rollouts``, else its place."""
    return str(row.get("id", row.get("task", f"row {where.rpartition(':')[2]}")))


def texts_of(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The texts of a row's sampled turns, at least one. Raises DataFailure."""
    name = next((name for name in TEXTS if row.get(name) is not None), None)
    if name is None:
        raise DataFailure(where, f"no completion: none of the columns {', '.join(TEXTS)}")
    value = row[name]
    parts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    texts = tuple(text for part in parts if (text := _text(part)) is not None)
    if not texts:
        raise DataFailure(
            where, f"{name} must be a text, a list of texts, or turns, not {value!r:.100}"
        )
    return texts


def _text(part: Any) -> str | None:
    """The text of a turn that the policy sampled; None for others."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not part.get(
        "sampled", part.get("role", "assistant") == "assistant"
    ):
        return None
    text = part.get("text", part.get("content"))
    return text if isinstance(text, str) else None


def truth_of(row: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """The value of the first of these columns that the row has. Raises DataFailure."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise DataFailure(where, f"no truth: none of the columns {', '.join(names)}")
    return row[name]


def played(row: Mapping[str, Any], results: Sequence[str] = ("env_result",)) -> Trajectory:
    """An episode without tokens.

    The environment's result is in the first of the columns ``results`` that the row has; a run's
    ``rollouts`` also have the turns and the images. Raises DataFailure.
    """
    name = next((name for name in results if row.get(name) is not None), None)
    try:
        result = None if name is None else float(row[name])
    except (TypeError, ValueError, OverflowError) as error:
        raise DataFailure(
            f"column {name}", f"must be a number, not {short(row[name or ''], 100)}"
        ) from error
    turns: Any = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return replace(PLAYED, env_result=result)
    return replace(
        PLAYED, env_result=result, turns=(Turn("prompt", (), _images(row)), *map(_turn, turns))
    )


def _turn(turn: Mapping[str, Any]) -> Turn:
    sampled = bool(turn.get("sampled"))
    executed, reward = turn.get("executed"), turn.get("reward") or 0.0
    return Turn(
        str(turn.get("role")),
        (),
        _images(turn),
        () if sampled else None,
        executed=executed,
        reward=reward,
    )


def _images(shown: Mapping[str, Any]) -> tuple[ImageRef, ...]:
    """The images of entries with ``width`` and ``height``; their cut by the model's processor is
    not saved.
    """
    found: Any = shown.get("images")
    entries = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    return tuple(
        ImageRef("", int(e.get("width") or 0), int(e.get("height") or 0), (0, 0, 0), 0)
        for e in entries
    )
