"""Questions about images, to be answered with code: PyVision's rows and flat ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.dataset import field, image_entry


class QuestionRows:
    """Reads PyVision's rows (``mm_hint``, ``reward_model``, ``extra_info``) or flat ones {id, image, question, answer, kind}; flat
    ones may have ``videos`` (animated pictures, or lists of frames), which only code sees. ``kind`` is the source, which splits the
    metrics."""

    class Settings(SettingsModel):
        prompt: str = "{question}"
        """The user's text behind the image; ``{question}`` is replaced by the row's."""

    def __init__(self, settings: QuestionRows.Settings) -> None:
        self._settings = settings

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task. Raises DataFailure."""
        flat = _flat(row, where) if "mm_hint" in row else row
        text = self._settings.prompt.replace("{question}", str(field(flat, "question", where)))
        return Task(
            str(field(flat, "id", where)),
            (Message("user", (*self._shown(flat, where, root), text)),),
            str(field(flat, "answer", where)),
            str(flat.get("kind", "")),
            {**flat, "root": str(root), **({"videos": _videos(flat["videos"], where, root)} if flat.get("videos") else {})},
        )

    def _shown(self, flat: Mapping[str, Any], where: str, root: Path) -> tuple[str | ImageSource, ...]:
        return () if flat.get("videos") and not flat.get("image") else (image_entry(field(flat, "image", where), where, root),)


def _videos(entries: Any, where: str, root: Path) -> list[str | list[str]]:
    """Their files below ``root``, as the interpreter wants them: one animated picture, or a list of frames. Raises DataFailure."""
    if not isinstance(entries, list | tuple) or not all(isinstance(one, str | list | tuple) for one in entries):
        raise DataFailure(where, f"videos must be a list of paths, or of lists of frames, not {entries!r:.100}")
    return [str(root / one) if isinstance(one, str) else [str(root / str(frame)) for frame in one] for one in entries]


def _flat(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    hint, extra = field(row, "mm_hint", where), field(row, "extra_info", where)
    if field(hint, "hint_type", where) != "image":
        raise DataFailure(where, f"only hints that are images are read, not {hint['hint_type']!r}")
    return {
        "id": str(field(extra, "index", where)),
        "image": field(hint, "hint_path", where),
        "question": field(extra, "question", where),
        "answer": field(field(row, "reward_model", where), "ground_truth", where),
        "kind": str(row.get("data_source", "")),
    }


def answered(text: str) -> str:
    """An episode's last turn with the answer ``text`` in the form that PyVision's verifier reads."""
    return f"<answer>\n\\boxed{{{text}}}\n</answer>"
