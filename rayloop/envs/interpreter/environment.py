"""PyVision's environment: the policy looks at images by writing Python, and answers when it has
seen enough.
"""

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
from rayloop.sandbox.cells import MOST_PIXELS
from rayloop.sandbox.host import CodeResult, Interpreter, Sandbox
from rayloop.sandbox.options import CodeDeadline, CodeFailed, Level, Options, SandboxFailed

MIB = 1 << 20
_LOADING = 30.0
"""Seconds to hand an episode's images over; beyond it the sandbox failed."""


Minimum = Literal["process", "filtered", "namespaces"]
_sandboxes: dict[Options, Sandbox] = {}
_lock = threading.Lock()


def shared_sandbox(minimum: Minimum, options: Options) -> Sandbox:
    """The strongest that works here. Raises ConfigError when that is less than ``minimum``."""
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
    """What this machine gives, in words. Raises ConfigError when it is less."""
    found = levels.reached()
    if found.short_of(Level(minimum)):
        raise ConfigError(
            f"sandbox.minimum: {minimum} is not reached here, only {found}. Code of the policy is"
            " not run. Use a newer kernel or another container profile (docs/security.md, The"
            " sandbox), or, where you trust what the policy writes, lower it"
        )
    return str(found)


def close_sandboxes() -> None:
    """Close the sandboxes of this process."""
    with _lock:
        for one in _sandboxes.values():
            one.close()
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
    """Modules loaded once for all interpreters; code can import others that are installed, at a
    cost each time.
    """

    @property
    def options(self) -> Options:
        """As the sandbox takes them."""
        return Options(
            memory=self.memory * MIB,
            scratch=self.scratch * MIB,
            spares=self.spares,
            preload=tuple(self.preload),
        )


class PythonInterpreter:
    """Each turn's code runs in a Python of the episode's own that keeps its names; a turn with an
    answer ends the episode.

    The task's images are there as ``image_clue_0`` and on; videos (``extra["videos"]``: for each,
    an animated image or a list of frames) as ``video_clue_0`` and on, read with ``len``, ``[i]``
    and ``get_batch``. ``evaluate`` counts turns that ran code.
    """

    class Settings(SettingsModel):
        """How code is run, and what the policy sees of it."""

        on_error: Literal["feed_back", "stop"] = "feed_back"
        """What failing code does: the policy sees the error, or the episode ends as
        ``action_error``, as PyVision's did.
        """
        code_timeout: float = Field(30.0, gt=0)
        """Seconds for a turn's code; then its interpreter is ended.

        Keep it below ``episode.step_timeout``.
        """
        show_images: bool = True
        """Whether the prompt shows the images.

        Without, code alone can look at them, under the names ``image_hint_0`` and on.
        """
        instruct: bool = True
        """Whether the first message explains how to write code and answers, and names the images;
        off where the prompt does.
        """
        role: str = "user"
        """The role under which results are shown: user as PyVision has it, or tool when the chat
        template has one.
        """
        forbidden: tuple[str, ...] = ()
        """Regular expressions of code that is refused unrun, as in PyVision's
        (``recipes/pyvision/original.py``); no protection.
        """
        wording: text.Wording = "rayloop"
        """rayloop, or the environment of PyVision-RL whose reading of turns, results and preloaded
        names a published model was trained with; a timeout is then an error in code. It needs
        instruct: false and on_error: stop.
        """
        fps: float = Field(1.0, gt=0)
        """Frames per second that a video's reader returns, where a row has no ``fps`` (a number, or
        a list: one for each video).
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
        self._shown = self._ran = 0
        self._rates: list[float] = []

    @staticmethod
    def preflight(settings: Settings) -> str:
        """Before a run begins: how code is confined here.

        Raises ConfigError for less than ``sandbox.minimum``.
        """
        return required_level(settings.sandbox.minimum)

    def reset(self, task: Task) -> Observation:
        """Raises DataFailure for an image or a row that cannot be read, EnvironmentFailed when the
        sandbox fails.
        """
        probed = [probe(image) for image in task.images]
        name = "image_clue" if self._settings.show_images else "image_hint"
        self._images = {f"{name}_{index}": data for index, (data, _, _) in enumerate(probed)}
        self._videos = {f"video_clue_{index}": frames for index, frames in enumerate(_videos(task))}
        self._rates = _rates(task, len(self._videos), self._settings.fps)
        self._begin()
        return Observation(self._prompt(task, [(width, height) for _, width, height in probed]))

    def step(self, turn: str) -> StepResult:
        """Run the turn's code.

        Raises ToolDeadline for code that hangs with ``on_error: stop`` and ``wording: rayloop``,
        and EnvironmentFailed when the sandbox fails.
        """
        ours = self._settings.wording == "rayloop"
        code = text.code(turn) if ours else text.published_code(turn)
        if (answer := text.answer(turn) if ours else text.published_answer(turn)) is not None:
            return StepResult(done=True, info={"final_answer": answer})
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

        self._ran += 1
        began = time.monotonic()
        try:
            given = self._interpreter.run(code, self._settings.code_timeout)
        except CodeFailed as error:
            self._interpreter = None
            if isinstance(error, CodeDeadline) and self._settings.on_error == "stop" and ours:
                raise ToolDeadline(f"the code of a turn: {error}") from error
            return self._refused(
                f"{error}; a new interpreter begins, without the names of the old one"
            )
        except SandboxFailed as error:
            raise EnvironmentFailed(f"the sandbox failed: {error}") from error
        return self._answered(given, began + self._settings.code_timeout)

    def evaluate(self) -> float:
        """How many turns ran code."""
        return float(self._ran)

    def close(self) -> None:
        """End the interpreter."""
        if self._interpreter is not None:
            self._interpreter.close()
            self._interpreter = None

    def _begin(self) -> None:
        """A new interpreter with the episode's images.

        Raises DataFailure for one that it cannot read, EnvironmentFailed.
        """
        try:
            self._interpreter = self._sandbox.interpreter()
            failed = self._given(self._interpreter)
        except (SandboxFailed, CodeFailed) as error:
            self.close()
            raise EnvironmentFailed(f"the sandbox failed: {error}") from error
        if failed:
            self.close()
            raise DataFailure("the task's images", f"the interpreter cannot read them: {failed}")

    def _given(self, interpreter: Interpreter) -> str | None:
        """Give it images, and what a published model finds there.

        Returns why not, or None. Raises SandboxFailed, CodeFailed.
        """
        failed = interpreter.images(self._images, _LOADING) if self._images else None
        for (name, encoded), rate in zip(self._videos.items(), self._rates, strict=True):
            failed = failed or interpreter.video(name, encoded, rate, _LOADING)
        if failed or self._settings.wording == "rayloop":
            return failed
        if error := interpreter.run(text.PRELUDE, _LOADING).error:
            raise SandboxFailed(f"its Python lacks what the published prelude imports: {error}")
        return None

    def _prompt(self, task: Task, sizes: Sequence[tuple[int, int]]) -> tuple[Message, ...]:
        """The task's messages; each image stands between its name's tags, or is left out."""
        messages = []
        for message in task.messages:
            parts: list[str | ImageSource] = []
            for part in message.parts:
                if isinstance(part, str):
                    parts.append(part)
                elif self._settings.show_images:
                    before, after = text.clue(self._shown)
                    parts += [before, part, after]
                    self._shown += 1
            messages.append(Message(message.role, tuple(parts)))
        if self._settings.instruct:
            inputs = [
                f"{name}: a PIL image of {width}x{height} pixels."
                for name, (width, height) in zip(self._images, sizes, strict=True)
            ]
            inputs += [
                f"{name}: a video; len({name}), {name}[i] and {name}.get_batch(indices)."
                for name in self._videos
            ]
            said = text.INSTRUCTIONS.format(inputs="\n".join(inputs) or "There is no image.")
            last = messages[-1]
            messages[-1] = Message(last.role, (*last.parts, f"\n{said}"))
        return tuple(messages)

    def _answered(self, given: CodeResult, until: float) -> StepResult:
        """What the policy is shown of an answer."""
        pictures, lost = _intact(given.images, until)
        lost += given.dropped
        said = given.text + (f"\n[{lost} pictures are not shown]" if lost else "")
        if given.error is not None:
            said = f"{said.rstrip()}\n{given.error}".lstrip()

        wording = self._settings.wording
        ours = text.opened(said), text.CLOSED
        opened, closed = (
            ours if wording == "rayloop" else text.published_result(wording, said, bool(pictures))
        )
        parts: list[str | ImageSource] = [opened]
        for picture in pictures:
            before, after = text.clue(self._shown)
            parts += [before, picture, f"{after}\n" if wording == "rayloop" else after]
            self._shown += 1

        observation = Observation((Message(self._settings.role, (*parts, closed)),))
        stops = given.error is not None and self._settings.on_error == "stop"
        return StepResult(
            observation, done=stops, error=given.error, info={"seconds": given.seconds}
        )

    def _refused(self, why: str) -> StepResult:
        observation = Observation(
            (Message(self._settings.role, (text.opened(f"Error: {why}"), text.CLOSED)),)
        )
        return StepResult(observation, done=self._settings.on_error == "stop", error=why)


def _intact(images: Sequence[bytes], until: float) -> tuple[list[ImageSource], int]:
    """The intact images, and the number of others: code can forge answers.

    Images not decoded ``until`` then are not shown.
    """
    plain: list[ImageSource] = []
    for image in images:
        with suppress(ValueError):
            plain.append(ImageSource(data=bare(image)))
    kept = [shown for shown in looked_at(plain, MOST_PIXELS, until) if shown is not None]
    return kept, len(images) - len(kept)


def _videos(task: Task) -> list[list[bytes]]:
    """The files of each video: one animated image, or one a frame, each of them a picture: the
    policy's code gets their bytes. Raises DataFailure.
    """
    given: Any = task.extra.get("videos", ())
    try:
        videos = [[video] if isinstance(video, str) else list(video) for video in given]
        return [
            [frame(ImageSource(path=path), len(video) == 1) for path in video] for video in videos
        ]
    except TypeError as error:
        raise DataFailure(task.id, f"videos: {error}") from error


def _rates(task: Task, videos: int, usual: float) -> list[float]:
    """Frames per second of each video: the row's number, its list, or ``usual`` where it has none.

    Raises DataFailure.
    """
    given: Any = task.extra.get("fps")
    each = list(given) if isinstance(given, list | tuple) else [given] * videos
    try:
        rates = [float(rate or usual) for rate in each]
    except (TypeError, ValueError):
        rates = []
    if len(rates) != videos or not all(0 < rate < math.inf for rate in rates):
        raise DataFailure(
            task.id,
            f"fps: got {given!r:.100}, expected a positive number, or one for each of {videos}"
            " videos",
        )
    return rates


_BEGIN = b"\x89PNG\r\n\x1a\n"
_OF_PIXELS = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"))
_MOST_CHUNKS = 4096
"""Pillow writes 64 KiB into each."""


def bare(png: bytes) -> bytes:
    """The PNG without profiles and texts, which can keep a decoder busy for half a minute.

    Raises ValueError.
    """
    if not png.startswith(_BEGIN):
        raise ValueError("it is no PNG")
    kept, at = [_BEGIN], len(_BEGIN)
    for _ in range(_MOST_CHUNKS):
        if at + 12 > len(png):
            raise ValueError("it is cut")
        length, kind = struct.unpack_from(">I4s", png, at)
        end = at + 12 + length
        if kind in _OF_PIXELS:
            kept.append(png[at:end])
        if kind == b"IEND":
            return b"".join(kept)
        at = end
    raise ValueError(f"it has more than {_MOST_CHUNKS} chunks")
