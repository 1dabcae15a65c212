"""Inside the sandbox: a Python that keeps its names between calls, and answers each with the text
and figures of the code. It runs in the same process as the code, so code can change every answer:
the host trusts none of them.
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

MOST_TEXT, MOST_ERROR, MOST_DROPPED = 20_000, 4_000, 10_000
_, MOST_IMAGES, MOST_BYTES = frames.MOST_ANSWERED
"""Figures of an answer, and bytes of all of them."""
MOST_PIXELS, MOST_ASPECT = 16_000_000, 200
"""A larger or longer figure is refused before it is drawn: drawing it is what costs."""
CELL = "<cell>"
_NAMES = {
    "plt": "matplotlib.pyplot",
    "np": "numpy",
    "Image": "PIL.Image",
    "math": "math",
    "io": "io",
    "base64": "base64",
}
"""What code finds without importing it, where it is installed."""


class Printed(io.TextIOBase):
    """stdout and stderr of one call: the first ``MOST_TEXT`` characters, none of threads that an
    earlier call left behind.
    """

    def __init__(self) -> None:
        # Code of a cell that replaces the module's function leaves this reference as it is.
        self._own_ident = threading.get_ident
        self.begin()

    def begin(self) -> None:
        """Forget the text of the call before; threads that it left behind are ignored from now on."""
        self._stale = set(sys._current_frames()) - {self._own_ident()}
        self._parts: list[str] = []
        self._size = self._lost = 0

    def writable(self) -> bool:
        """As of every stream that is written to."""
        return True

    def write(self, text: str) -> int:
        """Keep the part of ``text`` that there is room for.

        Returns the number of its characters, as streams do.
        """
        if self._own_ident() not in self._stale:
            kept = text[: max(0, MOST_TEXT - self._size)]
            self._parts.append(kept)
            self._size += len(kept)
            self._lost += len(text) - len(kept)
        return len(text)

    def text(self) -> str:
        """The kept text, and how many characters are left out."""
        return "".join(self._parts) + (more(self._lost) if self._lost else "")


def more(characters: int) -> str:
    """The end of a text of which so many are left out."""
    return f"\n[{characters} more characters]"


class Video:
    """Frames that are decoded when they are looked at.

    Has what decord's VideoReader has: len, [i], get_batch, get_avg_fps.
    """

    def __init__(self, encoded: Sequence[bytes], fps: float) -> None:
        self._encoded, self._fps = encoded, fps
        self._animated = self._open(0) if len(encoded) == 1 else None
        self._length = getattr(self._animated, "n_frames", 1) if self._animated else len(encoded)

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
            # PIL decodes every frame into the same image: without a copy the next seek changes it.
            self._animated.seek(index)
        shown = self._animated.copy() if self._animated else self._open(index)
        return importlib.import_module("numpy").asarray(rgb(shown)).view(_frame_type())

    def get_batch(self, indices: Sequence[int]) -> Any:
        """Several frames, [n, height, width, 3]."""
        return (
            importlib.import_module("numpy")
            .stack([self[index] for index in indices])
            .view(_frame_type())
        )

    def get_avg_fps(self) -> float:
        """Frames per second: the ``fps`` of the row, else that of the environment."""
        return self._fps


def _frame_type() -> type:
    """An array that also answers ``asnumpy()``, as decord's do."""
    numpy = importlib.import_module("numpy")
    return type("Frame", (numpy.ndarray,), {"asnumpy": lambda array: numpy.asarray(array)})


class Cells:
    """One interpreter: the names that code has made, and the figures of the present call."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._printed = connection, Printed()
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
        self, asked: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        self._figures, self._dropped = [], 0
        return {"run": self._run, "images": self._images, "video": self._video}[asked["op"]](
            asked, blobs
        ), self._figures

    def _images(self, asked: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
        """Each blob is an encoded image: a name in the code's space, with the pixels that the
        policy is shown.
        """
        for name, blob in zip(asked["names"], blobs, strict=True):
            self._space[name] = rgb(importlib.import_module("PIL.Image").open(io.BytesIO(blob)))
        return {}

    def _video(self, asked: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
        self._space[asked["name"]] = Video(blobs, asked["fps"])
        return {}

    def _run(self, asked: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
        self._printed.begin()
        sys.stdout = sys.stderr = self._printed
        code, started, error = asked["code"], time.perf_counter(), None

        # A traceback can show a line of the cell only when linecache has it: there is no such file.
        linecache.cache[CELL] = (len(code), None, code.splitlines(keepends=True), CELL)
        try:
            exec(compile(code, CELL, "exec"), self._space)
            self._show()
        except BaseException as raised:
            # SystemExit and KeyboardInterrupt of the code are results too: the interpreter goes on.
            error = _described(raised)
            if (plt := sys.modules.get("matplotlib.pyplot")) is not None:
                # A figure that is left open would be shown by the next cell.
                plt.close("all")
        sys.stdout = sys.stderr = self._printed
        took = time.perf_counter() - started
        return {
            "text": self._printed.text(),
            "error": error,
            "seconds": took,
            "dropped": self._dropped,
        }

    def _show(self, *arguments: Any, **options: Any) -> None:
        """``plt.show``: the open figures become images of the answer.

        The end of a cell shows what is left.
        """
        if (plt := sys.modules.get("matplotlib.pyplot")) is None:
            return
        for number in plt.get_fignums():
            figure = plt.figure(number)
            width, height = figure.get_size_inches() * figure.dpi
            if len(self._figures) >= MOST_IMAGES:
                self._drop()
            elif (
                max(width, height) >= MOST_ASPECT * max(1, min(width, height))
                or width * height > MOST_PIXELS
            ):
                self._printed.write(
                    f"[a figure of {int(width)}x{int(height)} pixels is not shown]\n"
                )
            else:
                encoded = io.BytesIO()
                figure.savefig(encoded, format="png")
                if sum(map(len, self._figures)) + encoded.tell() > MOST_BYTES:
                    self._drop()
                else:
                    self._figures.append(encoded.getvalue())
            plt.close(figure)

    def _drop(self) -> None:
        self._dropped = min(self._dropped + 1, MOST_DROPPED)


def _described(raised: BaseException) -> str:
    """The traceback as far as it is the cell's, the last ``MOST_ERROR`` characters."""
    try:
        places = [
            place for place in traceback.extract_tb(raised.__traceback__) if place.filename == CELL
        ]
        lines = (
            ["Traceback (most recent call last):\n", *traceback.format_list(places)]
            if places
            else []
        )
        return "".join([*lines, *traceback.format_exception_only(raised)])[-MOST_ERROR:].rstrip()
    except BaseException:
        return type(raised).__name__
