"""Inside the sandbox: a Python that keeps its names between calls.

It answers each call with the text and figures of the code. It runs in the same process as the code,
so code can change every answer: the host trusts none of them.
"""

import builtins
import importlib
import io
import linecache
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from rayloop.sandbox import frames
from rayloop.sandbox.pictures import rgb

MAX_TEXT_CHARACTERS = 20_000
"""Characters of an answer's text."""
MAX_ERROR_CHARACTERS = 4_000
"""Characters of an answer's traceback."""
MAX_DROPPED_FIGURES = 10_000
"""The highest count of figures that were left out."""
MOST_IMAGES = frames.MOST_ANSWERED.blobs
"""Figures of an answer."""
MOST_BYTES = frames.MOST_ANSWERED.size
"""Bytes of all figures of an answer."""
MAX_FIGURE_PIXELS = 16_000_000
"""A larger figure is refused before it is drawn, since drawing it would cost too much."""
MOST_ASPECT = 200
"""A figure that is longer than this many times its width is refused too."""
CELL = "<cell>"
_NAMES = {
    "plt": "matplotlib.pyplot",
    "np": "numpy",
    "Image": "PIL.Image",
    "math": "math",
    "io": "io",
    "base64": "base64",
}
"""Names that code may use without an import, where the module is installed."""


class Printed(io.TextIOBase):
    """The stdout and stderr of one call.

    It holds the first ``MAX_TEXT_CHARACTERS``, without the output of threads that an
    earlier call left behind.
    """

    def __init__(self) -> None:
        # Code of a cell that replaces the module's function leaves this reference as it is.
        self._own_ident = threading.get_ident
        self.begin()

    def begin(self) -> None:
        """Forget the text of the previous call, and ignore threads that it left behind."""
        self._stale_threads = set(sys._current_frames()) - {self._own_ident()}
        self._parts: list[str] = []
        self._size = 0
        self._omitted = 0

    def writable(self) -> bool:
        """True, as for every stream that takes text."""
        return True

    def write(self, text: str) -> int:
        """Keep the part of ``text`` that still fits.

        Returns the number of characters of ``text``, as streams do.
        """
        if self._own_ident() not in self._stale_threads:
            part = text[: max(0, MAX_TEXT_CHARACTERS - self._size)]
            self._parts.append(part)
            self._size += len(part)
            self._omitted += len(text) - len(part)
        return len(text)

    def text(self) -> str:
        """The kept text, and the number of characters that are left out."""
        text = "".join(self._parts)
        if self._omitted:
            text += more(self._omitted)
        return text


def more(characters: int) -> str:
    """The end of a text from which this many characters are left out."""
    return f"\n[{characters} more characters]"


class Video:
    """A reader that decodes a frame when code accesses it.

    It has the methods of decord's VideoReader: len, [i], get_batch, get_avg_fps.
    """

    def __init__(self, encoded: Sequence[bytes], fps: float) -> None:
        self._encoded = encoded
        self._fps = fps
        self._animated = self._open(0) if len(encoded) == 1 else None
        self._length = len(encoded)
        if self._animated:
            self._length = getattr(self._animated, "n_frames", 1)

    def _open(self, index: int) -> Any:
        return importlib.import_module("PIL.Image").open(io.BytesIO(self._encoded[index]))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """One frame, an array [height, width, 3] of bytes. Raises IndexError."""
        if not -self._length <= index < self._length:
            raise IndexError(f"frame {index} of {self._length}")
        index %= self._length
        if self._animated:
            self._animated.seek(index)
            # PIL decodes every frame into the same image: without a copy the next seek changes it.
            image = self._animated.copy()
        else:
            image = self._open(index)
        numpy = importlib.import_module("numpy")
        return numpy.asarray(rgb(image)).view(_frame_type())

    def get_batch(self, indices: Sequence[int]) -> Any:
        """Several frames, [n, height, width, 3]."""
        numpy = importlib.import_module("numpy")
        batch = numpy.stack([self[index] for index in indices])
        return batch.view(_frame_type())

    def get_avg_fps(self) -> float:
        """Frames per second: the ``fps`` of the row, else that of the environment."""
        return self._fps


def _frame_type() -> type:
    """A type of array that also has ``asnumpy()``, as decord's arrays do."""
    numpy = importlib.import_module("numpy")
    return type("Frame", (numpy.ndarray,), {"asnumpy": lambda array: numpy.asarray(array)})


class Cells:
    """One interpreter: the names that code has defined, and the figures of the present call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._printed = Printed()
        self._space: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self._figures: list[bytes] = []
        self._dropped = 0

    def serve(self) -> None:
        """Answer until the host closes the connection."""
        for name, module in _NAMES.items():
            if module in sys.modules:
                self._space[name] = sys.modules[module]
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].show = self._show  # type: ignore[attr-defined]
        sys.stdin = io.StringIO("")
        frames.Channel(self._connection, frames.MOST_GIVEN).serve(self._answer)
        # An ordinary exit would wait for threads that the code has left running.
        os._exit(0)

    def _answer(
        self, request: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Answer one call with a header and the figures of its code."""
        self._figures = []
        self._dropped = 0
        operations = {"run": self._run, "images": self._images, "video": self._video}
        operation = operations[request["op"]]
        return operation(request, blobs), self._figures

    def _images(self, request: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
        """Define a name for each encoded image, with the pixels that the policy is shown."""
        for name, blob in zip(request["names"], blobs, strict=True):
            image = importlib.import_module("PIL.Image").open(io.BytesIO(blob))
            self._space[name] = rgb(image)
        return {}

    def _video(self, request: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
        self._space[request["name"]] = Video(blobs, request["fps"])
        return {}

    def _run(self, request: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
        self._printed.begin()
        sys.stdout = sys.stderr = self._printed
        code = request["code"]
        started = time.perf_counter()
        traceback_text = None

        # The cell is not a file: a traceback can show its lines only when linecache has them.
        linecache.cache[CELL] = (len(code), None, code.splitlines(keepends=True), CELL)
        try:
            exec(compile(code, CELL, "exec"), self._space)
            self._show()
        except BaseException as error:
            # SystemExit and KeyboardInterrupt of the code are results too: the interpreter stays.
            traceback_text = _format_traceback(error)
            plt = sys.modules.get("matplotlib.pyplot")
            if plt is not None:
                # A figure that is left open would be shown by the next cell.
                plt.close("all")
        # The code may have replaced both streams.
        sys.stdout = sys.stderr = self._printed
        seconds = time.perf_counter() - started
        return {
            "text": self._printed.text(),
            "error": traceback_text,
            "seconds": seconds,
            "dropped": self._dropped,
        }

    def _show(self, *arguments: Any, **options: Any) -> None:
        """Replace ``plt.show``: turn the open figures into images of the answer.

        The end of a cell shows the figures that are still open.
        """
        plt = sys.modules.get("matplotlib.pyplot")
        if plt is None:
            return
        for number in plt.get_fignums():
            figure = plt.figure(number)
            self._add(figure)
            plt.close(figure)

    def _add(self, figure: Any) -> None:
        """Draw a figure into the answer unless it, or the answer, is too large."""
        width, height = figure.get_size_inches() * figure.dpi
        is_too_long = max(width, height) >= MOST_ASPECT * max(1, min(width, height))
        if len(self._figures) >= MOST_IMAGES:
            self._count_dropped()
        elif is_too_long or width * height > MAX_FIGURE_PIXELS:
            self._printed.write(f"[a figure of {int(width)}x{int(height)} pixels is not shown]\n")
        else:
            encoded = io.BytesIO()
            figure.savefig(encoded, format="png")
            if sum(map(len, self._figures)) + encoded.tell() > MOST_BYTES:
                self._count_dropped()
            else:
                self._figures.append(encoded.getvalue())

    def _count_dropped(self) -> None:
        self._dropped = min(self._dropped + 1, MAX_DROPPED_FIGURES)


def _format_traceback(error: BaseException) -> str:
    """The traceback without frames outside the cell, its last ``MAX_ERROR_CHARACTERS``."""
    try:
        cell_frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == CELL
        ]
        lines = traceback.format_exception_only(error)
        if cell_frames:
            heading = "Traceback (most recent call last):\n"
            lines = [heading, *traceback.format_list(cell_frames), *lines]
        return "".join(lines)[-MAX_ERROR_CHARACTERS:].rstrip()
    except BaseException:
        # Code can define exceptions whose text cannot be made.
        return type(error).__name__
