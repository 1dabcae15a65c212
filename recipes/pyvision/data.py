"""Questions about images, to be answered with code or tools.

Reads PyVision's, DeepEyes' and flat rows, with our prompt or the published ones.
"""

import io
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import DataFailure
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.dataset import ChatRows
from rayloop.data.images import ANIMATED, FORMATS, read
from rayloop.data.messages import field, image_entry

Published = Literal[
    "vistool_with_img_info_v2",
    "vis_tool_with_img_info_wo_init_image_v2",
    "vis_tool_with_img_info_video_v4",
    "deepeyes",
]
_FIELD = re.compile(r"\{(\w+)\}")


@cache
def published_text(name: str) -> str:
    """A text of ``prompts/``, as it was published."""
    return (Path(__file__).parent / "prompts" / f"{name}.txt").read_bytes().decode()


class QuestionRows:
    """Reads published rows or flat ones {id, image, question, answer, kind}.

    Published rows have ``extra_info`` and ``reward_model`` with PyVision's ``mm_hint`` or DeepEyes'
    ``images``, or are {question, answer, image_path}. Flat ones may have ``videos`` (animated
    pictures, or lists of frames) that only code sees. ``kind`` is the source, which splits the
    metrics.
    """

    class Settings(SettingsModel):
        prompt: str = "{question}"
        """The user's text after the image.

        ``{question}`` and the row's other columns in braces are replaced, and ``{width}`` and
        ``{height}`` by the image's pixels. Other braces stay.
        """
        published: Published | None = None
        """Ask as the original does, instead of with ``prompt``.

        The prompt is the row's ``prompt``, or, where it has none, this text of ``prompts/``
        (``deepeyes``: its two), filled in as the original's reader does. A row that has a prompt
        and names no environment (``environment``, ``env_name``) is of the kind ``none`` of
        ``environment.kinds``, without tools.
        """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._chat = ChatRows(ChatRows.Settings())

    def task(self, row: Mapping[str, Any], where: str, root: Path) -> Task:
        """The row as a task. Raises DataFailure."""
        flat = _flat(row, where)
        videos = _videos(flat["videos"], where, root) if flat.get("videos") else []
        images: list[ImageSource] = []
        if flat.get("image") or not videos:
            images = [image_entry(field(flat, "image", where), where, root)]
        row_prompt = row.get("prompt")
        kind = row.get("env_name") or row.get("environment")
        if self._settings.published is None:
            text = filled(self._settings.prompt, flat, images, where)
            messages: tuple[Message, ...] = (Message("user", (*self._shown(images), text)),)
        elif isinstance(row_prompt, list | tuple) and row_prompt:
            kind = kind or "none"
            row_images = [flat["image"]] if images else []
            chat_row = {"prompt": row_prompt, "images": row_images, "id": ""}
            messages = self._chat.task(chat_row, where, root).messages
        else:
            messages = _asked(self._settings.published, flat, images, videos, where)
        extra = {name: value for name, value in flat.items() if name != "image"}
        extra["root"] = str(root)
        if videos:
            extra["videos"] = videos
        return Task(
            str(field(flat, "id", where)),
            messages,
            str(field(flat, "answer", where)),
            str(flat.get("kind", "")),
            extra,
            str(kind or ""),
        )

    def _shown(self, images: list[ImageSource]) -> tuple[str | ImageSource, ...]:
        """The parts before the text; a subclass can name the images."""
        return tuple(images)


def filled(text: str, row: Mapping[str, Any], images: list[ImageSource], where: str) -> str:
    """``text`` with the row's columns, and the first image's ``{width}`` and ``{height}``.

    Raises DataFailure.
    """
    field(row, "question", where)
    size: dict[str, int] = {}
    if images and ("{width}" in text or "{height}" in text):
        size["width"], size["height"], _ = _shape(images[0], where)

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        return str(row.get(name, size.get(name, match[0])))

    return _FIELD.sub(value_of, text)


def _asked(
    name: Published,
    row: Mapping[str, Any],
    images: list[ImageSource],
    videos: list[Any],
    where: str,
) -> tuple[Message, ...]:
    """The messages that the original makes of a row.

    They follow PyVision-RL's ``rl_dataset.py`` and ``rl_dataset_wo_mm_hint.py``, and DeepEyes'
    evaluation.
    """
    question = str(field(row, "question", where))
    if name == "deepeyes":
        system = Message("system", (published_text("deepeyes_system"),))
        user = Message("user", (*images, question + published_text("deepeyes_user")))
        return system, user
    template = published_text(name)
    if name == "vis_tool_with_img_info_video_v4":
        text = template.format(query=question, video_info=_film(row, videos, where))
        return (Message("user", (text,)),)
    width, height, _ = _shape(images[0], where)
    if name == "vistool_with_img_info_v2":
        text = template.format(query=question, width=width, height=height)
        return (Message("user", (*images, f"\n{text}")),)
    info = (
        f"Image Width: {width}; Image Height: {height}\n"
        "The original image hint has been read into the global variable `image_hint_0`."
    )
    text = template.format(query=question, image_info=info)
    return (Message("user", (*images, text)),)


def _film(row: Mapping[str, Any], videos: list[Any], where: str) -> str:
    """The description of a video in the original's prompt. Raises DataFailure without one."""
    if not videos:
        raise DataFailure(where, "the prompt describes a video, and the row has none")
    frames = videos[0] if isinstance(videos[0], list) else [videos[0]]
    width, height, count = _shape(ImageSource(frames[0]), where)
    if len(frames) > 1:
        count = len(frames)
    fps = row.get("fps")
    if isinstance(fps, list | tuple):
        fps = fps[0]
    rate = float(fps or 1)
    return (
        f"Frame Width: {width}; Frame Height: {height};\nVideo Length: {count}; Sample FPS:"
        f" {rate:.2f}\nThe original video has been read into the global variable `video_clue_0`."
    )


def _shape(image: ImageSource, where: str) -> tuple[int, int, int]:
    """Width, height and number of pictures as the file has them. Raises DataFailure."""
    try:
        with Image.open(io.BytesIO(read(image)), formats=(*FORMATS, *ANIMATED)) as opened:
            return *opened.size, getattr(opened, "n_frames", 1)
    except (OSError, ValueError) as error:
        raise DataFailure(where, f"no readable image: {error}") from error


def _videos(entries: Any, where: str, root: Path) -> list[str | list[str]]:
    """The files of the videos below ``root``. Raises DataFailure.

    As for the interpreter, each is one animated picture, or a list of frames.
    """
    is_list = isinstance(entries, list | tuple)
    if not is_list or not all(isinstance(entry, str | list | tuple) for entry in entries):
        raise DataFailure(
            where, f"videos must be a list of paths, or of lists of frames, not {entries!r:.100}"
        )
    videos: list[str | list[str]] = []
    for entry in entries:
        if isinstance(entry, str):
            videos.append(str(root / entry))
        else:
            videos.append([str(root / str(frame)) for frame in entry])
    return videos


def _flat(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A published row as a flat one; a flat one as it is. Raises DataFailure."""
    is_published = not {"mm_hint", "extra_info", "image_path"}.isdisjoint(row)
    if "image" in row or "videos" in row or not is_published:
        return row
    if "extra_info" not in row and "mm_hint" not in row:
        return {
            "id": Path(where).name,
            "kind": row.get("data_source", ""),
            **row,
            "image": row["image_path"],
        }
    hint = row.get("mm_hint")
    extra = field(row, "extra_info", where)
    if hint and field(hint, "hint_type", where) != "image":
        raise DataFailure(where, f"only hints that are images are read, not {hint['hint_type']!r}")
    return {
        "id": str(field(extra, "index", where)) if hint else Path(where).name,
        "image": field(hint, "hint_path", where) if hint else field(row, "images", where)[0],
        "question": field(extra, "question", where),
        "answer": field(field(row, "reward_model", where), "ground_truth", where),
        "kind": str(row.get("data_source", "")),
    }


def answered(text: str) -> str:
    """A last turn with the answer ``text`` in the form that PyVision's verifier reads."""
    return f"<answer>\n\\boxed{{{text}}}\n</answer>"
