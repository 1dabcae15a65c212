"""Saved completions, and how a recipe scores them without a run.

A recipe defines it as ``SCORING`` in its module ``score``.
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
"""Columns of completions; the first one in a row counts.

It has a text, a list of texts (one per turn), messages (the assistant's count), or the turns of a
run's ``rollouts`` (the sampled ones count).
"""

EMPTY_TRAJECTORY = Trajectory(TrajectoryId(0, 0), 0, "", 0, (), Sampling(), EndReason.DONE)
"""The trajectory of a saved completion, whose tokens are unknown."""


@dataclass(frozen=True)
class Saved:
    """One saved completion.

    It has the texts of the sampled turns, the task with the truth, the row, the other data of the
    episode (``trajectory``), and the training step that the reward assumes.
    """

    texts: tuple[str, ...]
    task: Task
    row: Mapping[str, Any]
    trajectory: Trajectory = EMPTY_TRAJECTORY
    step: int = 0


@dataclass(frozen=True)
class OfflineScoring:
    """The rewards of a recipe that can be computed without a run.

    ``use`` is the reward's class. ``settings`` makes its ``with`` from a variant and the one wanted
    component (None: all). ``rewards`` are the components, ``aliases`` their other names. ``read``
    makes a ``Saved`` from a row and its place, and raises DataFailure. ``answer`` finds the answer
    that a variant scores. ``notes`` are last lines about all rows together, such as a comparison
    with columns of the file. ``others``: the class of a variant whose reward is not ``use``.
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
    _, _, line = where.rpartition(":")
    return str(row.get("id", row.get("task", f"row {line}")))


def texts_of(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The texts of a row's sampled turns, at least one. Raises DataFailure."""
    name = _first_column(row, TEXTS)
    if name is None:
        raise DataFailure(where, f"no completion: none of the columns {', '.join(TEXTS)}")
    value = row[name]
    parts: list[Any] = []
    if isinstance(value, str):
        parts = [value]
    elif isinstance(value, list):
        parts = value
    texts = [_text(part) for part in parts]
    sampled_texts = tuple(text for text in texts if text is not None)
    if not sampled_texts:
        raise DataFailure(
            where, f"{name} must be a text, a list of texts, or turns, not {value!r:.100}"
        )
    return sampled_texts


def _first_column(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of the columns ``names`` that has a value in this row."""
    return next((name for name in names if row.get(name) is not None), None)


def _text(part: Any) -> str | None:
    """The text of a turn that the policy sampled; None for others."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None
    is_assistant = part.get("role", "assistant") == "assistant"
    if not part.get("sampled", is_assistant):
        return None
    text = part.get("text", part.get("content"))
    return text if isinstance(text, str) else None


def truth_of(row: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """The value of the first of these columns that the row has. Raises DataFailure."""
    name = _first_column(row, names)
    if name is None:
        raise DataFailure(where, f"no truth: none of the columns {', '.join(names)}")
    return row[name]


def trajectory_of(row: Mapping[str, Any], results: Sequence[str] = ("env_result",)) -> Trajectory:
    """An episode without tokens.

    The environment's result is in the first of the columns ``results`` that the row has; a run's
    ``rollouts`` also have the turns and the images. Raises DataFailure.
    """
    name = _first_column(row, results)
    result = None
    if name is not None:
        try:
            result = float(row[name])
        except (TypeError, ValueError, OverflowError) as error:
            raise DataFailure(
                f"column {name}", f"must be a number, not {short(row[name], 100)}"
            ) from error
    turns: Any = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return replace(EMPTY_TRAJECTORY, env_result=result)
    prompt = Turn("prompt", (), _images(row))
    return replace(EMPTY_TRAJECTORY, env_result=result, turns=(prompt, *map(_turn, turns)))


def _turn(turn: Mapping[str, Any]) -> Turn:
    return Turn(
        str(turn.get("role")),
        (),
        _images(turn),
        # Only a sampled turn has log-probs.
        () if turn.get("sampled") else None,
        executed=turn.get("executed"),
        reward=turn.get("reward") or 0.0,
    )


def _images(turn: Mapping[str, Any]) -> tuple[ImageRef, ...]:
    """The images of a turn, with ``width`` and ``height``.

    The patches of the model's processor are not saved.
    """
    entries: Any = turn.get("images")
    if not isinstance(entries, list):
        return ()
    images = []
    for entry in entries:
        if isinstance(entry, Mapping):
            width = int(entry.get("width") or 0)
            height = int(entry.get("height") or 0)
            images.append(ImageRef("", width, height, (0, 0, 0), 0))
    return tuple(images)
