"""PyVision's environment: the policy looks at images by writing Python, then answers."""

import atexit
import math
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, DataFailure, EnvironmentFailed, ToolDeadline
from rayloop.core.protocols import Observation, StepResult
from rayloop.core.types import ImageSource, Message, Task
from rayloop.data.images import frame, looked_at, probe
from rayloop.envs.interpreter import text
from rayloop.sandbox import levels
from rayloop.sandbox.cells import MAX_FIGURE_PIXELS
from rayloop.sandbox.host import CodeResult, Interpreter, Sandbox
from rayloop.sandbox.options import CodeDeadline, CodeFailed, Level, Options, SandboxFailed

MIB = 1 << 20
_LOAD_TIMEOUT_S = 30.0
"""Seconds to hand over an episode's images; beyond it the sandbox failed."""


Minimum = Literal["process", "filtered", "namespaces"]
_sandboxes: dict[Options, Sandbox] = {}
_lock = threading.Lock()


def shared_sandbox(minimum: Minimum, options: Options) -> Sandbox:
    """Return the strongest sandbox that works here. Raises ConfigError below ``minimum``."""
    required_level(minimum)
    level = levels.reached().level
    assert level is not None
    with _lock:
        if options not in _sandboxes:
            if not _sandboxes:
                atexit.register(close_sandboxes)
            _sandboxes[options] = Sandbox(level, options)
        return _sandboxes[options]


def required_level(minimum: Minimum) -> str:
    """Describe the level that this machine gives. Raises ConfigError when it is too low."""
    reached = levels.reached()
    if reached.short_of(Level(minimum)):
        raise ConfigError(
            f"sandbox.minimum: {minimum} is not reached here, only {reached}. Code of the policy is"
            " not run. Use a newer kernel or another container profile (docs/security.md, The"
            " sandbox), or, where you trust what the policy writes, lower it"
        )
    return str(reached)


def close_sandboxes() -> None:
    """Close the sandboxes of this process."""
    with _lock:
        for sandbox in _sandboxes.values():
            sandbox.close()
        _sandboxes.clear()


class SandboxSettings(SettingsModel):
    """How the policy's code is confined, and what it may use."""

    minimum: Minimum = "filtered"
    """The weakest level that may be used; the strongest that works is taken.

    Lower it only for trusted code (docs/security.md).
    """
    memory: int = Field(2048, ge=256)
    """MiB of address space of an interpreter.

    Raise it for large images or when your ``preload`` needs more.
    """
    scratch: int = Field(64, ge=1)
    """MiB of files an interpreter may keep, where it may write any.

    Raise it when code is expected to write files.
    """
    spares: int = Field(2, ge=0)
    """Interpreters that wait, ready, in each process that plays episodes.

    Raise it when many episodes begin in the same moment.
    """
    preload: tuple[str, ...] = ("numpy", "PIL.Image", "matplotlib.pyplot")
    """Modules that are loaded once for all interpreters.

    Code can import other installed modules, which takes time in each episode.
    """

    @property
    def options(self) -> Options:
        """The settings as the sandbox takes them."""
        return Options(
            memory=self.memory * MIB,
            scratch=self.scratch * MIB,
            spares=self.spares,
            preload=tuple(self.preload),
        )


class PythonInterpreter:
    """Runs each turn's code in the episode's Python, which keeps its names.

    A turn with an answer ends the episode. Code finds the task's images as ``image_clue_0`` and on,
    and its videos (``extra["videos"]``: for each, an animated image or a list of frames) as
    ``video_clue_0`` and on, read with ``len``, ``[i]`` and ``get_batch``. ``evaluate`` counts turns
    that ran code.
    """

    class Settings(SettingsModel):
        """How code is run, and what the policy sees of it."""

        on_error: Literal["feed_back", "stop"] = "feed_back"
        """What failing code does.

        The policy sees the error, or the episode ends as ``action_error``, as PyVision's did.
        """
        code_timeout: float = Field(30.0, gt=0)
        """Seconds for a turn's code; its interpreter is ended after them.

        Keep it below ``episode.step_timeout``.
        """
        show_images: bool = True
        """Whether the prompt shows the images.

        Without, only code can look at them, under the names ``image_hint_0`` and on.
        """
        instruct: bool = True
        """Whether the first message explains how to write code and answers, and names the images.

        Turn it off where the prompt does.
        """
        role: str = "user"
        """The role under which results are shown.

        PyVision has user; take tool when the chat template has that role.
        """
        forbidden: tuple[str, ...] = ()
        """Regular expressions of code that is refused and not run.

        PyVision's are in ``recipes/pyvision/original.py``. They protect nothing.
        """
        wording: text.Wording = "rayloop"
        """rayloop, or the environment of PyVision-RL that a published model was trained with.

        That decides how turns are read, results are written and names are preloaded, and makes a
        timeout an error in code. It needs instruct: false and on_error: stop.
        """
        fps: float = Field(1.0, gt=0)
        """Frames per second that a video's reader returns, where a row has no ``fps``.

        A row's ``fps`` is a number, or a list with one for each video.
        """
        sandbox: SandboxSettings = SandboxSettings()
        """How strongly code is confined, and its limits."""

        @model_validator(mode="after")
        def _as_trained(self) -> Self:
            if self.wording != "rayloop" and (self.instruct or self.on_error != "stop"):
                raise ValueError(
                    f"wording {self.wording} needs instruct: false and on_error: stop, as its"
                    " models were trained"
                )
            return self

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError when the machine does not reach ``sandbox.minimum``."""
        self._settings = settings
        self._sandbox = shared_sandbox(settings.sandbox.minimum, settings.sandbox.options)
        self._interpreter: Interpreter | None = None
        self._images: dict[str, bytes] = {}
        self._videos: dict[str, list[bytes]] = {}
        self._shown_images = 0
        self._code_turns = 0
        self._rates: list[float] = []

    @staticmethod
    def preflight(settings: Settings) -> str:
        """Say how code is confined here. Raises ConfigError for less than ``sandbox.minimum``."""
        return required_level(settings.sandbox.minimum)

    def reset(self, task: Task) -> Observation:
        """Begin an episode with the task's images.

        Raises DataFailure for an image or a row that cannot be read, EnvironmentFailed when the
        sandbox fails.
        """
        probed = [probe(image) for image in task.images]
        name = "image_clue" if self._settings.show_images else "image_hint"
        self._images = {f"{name}_{index}": data for index, (data, _, _) in enumerate(probed)}
        self._videos = {f"video_clue_{index}": frames for index, frames in enumerate(_videos(task))}
        self._rates = _rates(task, len(self._videos), self._settings.fps)
        self._begin()
        sizes = [(width, height) for _, width, height in probed]
        return Observation(self._prompt(task, sizes))

    def step(self, turn: str) -> StepResult:
        """Run the turn's code.

        Raises ToolDeadline for code that hangs with ``on_error: stop`` and ``wording: rayloop``,
        and EnvironmentFailed when the sandbox fails.
        """
        is_published = self._settings.wording != "rayloop"
        answer = text.published_answer(turn) if is_published else text.answer(turn)
        if answer is not None:
            return StepResult(done=True, info={"final_answer": answer})
        code = text.published_code(turn) if is_published else text.code(turn)
        if code is None:
            return self._refused(
                "there is neither code (a ```python block, closed by ```) nor an <answer> in this"
                " turn"
            )
        if text.forbidden(code, self._settings.forbidden):
            return self._refused("there is a call in this code that is forbidden")

        if self._interpreter is None:
            self._begin()
        assert self._interpreter is not None

        self._code_turns += 1
        start_time = time.monotonic()
        try:
            result = self._interpreter.run(code, self._settings.code_timeout)
        except CodeFailed as error:
            self._interpreter = None
            stops = self._settings.on_error == "stop" and not is_published
            if isinstance(error, CodeDeadline) and stops:
                raise ToolDeadline(f"the code of a turn: {error}") from error
            return self._refused(
                f"{error}; a new interpreter begins, without the names of the old one"
            )
        except SandboxFailed as error:
            raise EnvironmentFailed(f"the sandbox failed: {error}") from error
        return self._answered(result, start_time + self._settings.code_timeout)

    def evaluate(self) -> float:
        """Return how many turns ran code."""
        return float(self._code_turns)

    def close(self) -> None:
        """End the interpreter."""
        if self._interpreter is not None:
            self._interpreter.close()
            self._interpreter = None

    def _begin(self) -> None:
        """Start an interpreter with the episode's images.

        Raises DataFailure for an image that it cannot read, EnvironmentFailed.
        """
        try:
            self._interpreter = self._sandbox.interpreter()
            unreadable = self._load_images(self._interpreter)
        except (SandboxFailed, CodeFailed) as error:
            self.close()
            raise EnvironmentFailed(f"the sandbox failed: {error}") from error
        if unreadable:
            self.close()
            raise DataFailure(
                "the task's images", f"the interpreter cannot read them: {unreadable}"
            )

    def _load_images(self, interpreter: Interpreter) -> str | None:
        """Give it the images, and what a published model finds there.

        Returns the reason why it cannot read them, or None. Raises SandboxFailed, CodeFailed.
        """
        unreadable = None
        if self._images:
            unreadable = interpreter.images(self._images, _LOAD_TIMEOUT_S)
        for (name, encoded), rate in zip(self._videos.items(), self._rates, strict=True):
            unreadable = unreadable or interpreter.video(name, encoded, rate, _LOAD_TIMEOUT_S)
        if unreadable or self._settings.wording == "rayloop":
            return unreadable
        error = interpreter.run(text.PRELUDE, _LOAD_TIMEOUT_S).error
        if error:
            raise SandboxFailed(f"its Python lacks what the published prelude imports: {error}")
        return None

    def _prompt(self, task: Task, sizes: Sequence[tuple[int, int]]) -> tuple[Message, ...]:
        """Return the task's messages; each image stands between its name's tags, or is left out."""
        messages = []
        for message in task.messages:
            parts: list[str | ImageSource] = []
            for part in message.parts:
                if isinstance(part, str):
                    parts.append(part)
                elif self._settings.show_images:
                    opening, closing = text.clue(self._shown_images)
                    parts += [opening, part, closing]
                    self._shown_images += 1
            messages.append(Message(message.role, tuple(parts)))
        if self._settings.instruct:
            last = messages[-1]
            messages[-1] = Message(last.role, (*last.parts, f"\n{self._instructions(sizes)}"))
        return tuple(messages)

    def _instructions(self, sizes: Sequence[tuple[int, int]]) -> str:
        inputs = []
        for name, (width, height) in zip(self._images, sizes, strict=True):
            inputs.append(f"{name}: a PIL image of {width}x{height} pixels.")
        for name in self._videos:
            inputs.append(f"{name}: a video; len({name}), {name}[i] and {name}.get_batch(indices).")
        return text.INSTRUCTIONS.format(inputs="\n".join(inputs) or "There is no image.")

    def _answered(self, result: CodeResult, deadline: float) -> StepResult:
        """Show the policy the result of its code."""
        pictures, hidden = _intact(result.images, deadline)
        hidden += result.dropped
        output = result.text
        if hidden:
            output += f"\n[{hidden} pictures are not shown]"
        if result.error is not None:
            output = f"{output.rstrip()}\n{result.error}".lstrip()

        wording = self._settings.wording
        if wording == "rayloop":
            head, tail = text.opened(output), text.CLOSED
        else:
            head, tail = text.published_result(wording, output, bool(pictures))
        parts: list[str | ImageSource] = [head]
        for picture in pictures:
            opening, closing = text.clue(self._shown_images)
            parts += [opening, picture, f"{closing}\n" if wording == "rayloop" else closing]
            self._shown_images += 1

        observation = Observation((Message(self._settings.role, (*parts, tail)),))
        stops = result.error is not None and self._settings.on_error == "stop"
        return StepResult(
            observation, done=stops, error=result.error, info={"seconds": result.seconds}
        )

    def _refused(self, reason: str) -> StepResult:
        parts = (text.opened(f"Error: {reason}"), text.CLOSED)
        observation = Observation((Message(self._settings.role, parts),))
        return StepResult(observation, done=self._settings.on_error == "stop", error=reason)


def _intact(images: Sequence[bytes], deadline: float) -> tuple[list[ImageSource], int]:
    """Return the intact images, and the number of others: code can forge answers.

    Images that are not decoded by the deadline are not shown.
    """
    sources: list[ImageSource] = []
    for image in images:
        with suppress(ValueError):
            sources.append(ImageSource(data=bare(image)))
    checked = looked_at(sources, MAX_FIGURE_PIXELS, deadline)
    intact = [image for image in checked if image is not None]
    return intact, len(images) - len(intact)


def _videos(task: Task) -> list[list[bytes]]:
    """Return the files of each video: one animated image, or one picture a frame.

    The policy's code gets their bytes. Raises DataFailure.
    """
    column: Any = task.extra.get("videos", ())
    try:
        videos = [[video] if isinstance(video, str) else list(video) for video in column]
        return [_frames(video) for video in videos]
    except TypeError as error:
        raise DataFailure(task.id, f"videos: {error}") from error


def _frames(paths: Sequence[str]) -> list[bytes]:
    may_be_animated = len(paths) == 1
    return [frame(ImageSource(path=path), may_be_animated) for path in paths]


def _rates(task: Task, videos: int, default: float) -> list[float]:
    """Return the frames per second of each video.

    They are the row's number, its list, or ``default`` where it has none. Raises DataFailure.
    """
    column: Any = task.extra.get("fps")
    per_video = list(column) if isinstance(column, list | tuple) else [column] * videos
    try:
        rates = [float(rate or default) for rate in per_video]
    except (TypeError, ValueError):
        rates = []
    if len(rates) != videos or not all(0 < rate < math.inf for rate in rates):
        raise DataFailure(
            task.id,
            f"fps: got {column!r:.100}, expected a positive number, or one for each of {videos}"
            " videos",
        )
    return rates


_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_MAX_CHUNKS = 4096
"""Pillow writes 64 KiB into each."""


def bare(png: bytes) -> bytes:
    """Return the PNG without profiles and texts.

    Those can keep a decoder busy for half a minute. Raises ValueError.
    """
    if not png.startswith(_PNG_SIGNATURE):
        raise ValueError("it is not a PNG")
    chunks = [_PNG_SIGNATURE]
    start = len(_PNG_SIGNATURE)
    for _ in range(_MAX_CHUNKS):
        if start + 12 > len(png):
            raise ValueError("it is cut")
        length, kind = struct.unpack_from(">I4s", png, start)
        end = start + 12 + length
        if kind in _PIXEL_CHUNKS:
            chunks.append(png[start:end])
        if kind == b"IEND":
            return b"".join(chunks)
        start = end
    raise ValueError(f"it has more than {_MAX_CHUNKS} chunks")
