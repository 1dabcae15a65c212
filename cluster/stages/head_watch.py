"""Whether the cluster that a run was started in is still there. Without its head a run goes on for a while; then Ray ends the
process without a word, and a head that was started again knows nothing of the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray.exceptions import AuthenticationError

from rayloop.cluster.session import ask_head
from rayloop.core.failures import MachineFailed

SILENCE = 50.0
"""Seconds in which the head does not listen, after which it is given up. Ray ends this process after 60
(``RAY_gcs_rpc_server_reconnect_timeout_s``)."""
PERIOD, ANSWER = 2.0, 5.0
"""Seconds between two questions, and in which one is answered."""
TOLD = 10.0
"""Seconds after which that is told."""


class HeadGone(MachineFailed):
    """The head of the cluster has ended, or was started again. What waits for one of its actors waits in vain."""


class HeadWatch:
    """``ask`` raises what ``ask_head`` does, when the head is not there, within so many seconds. ``note`` tells a person."""

    def __init__(self, note: Callable[[str], None], ask: Callable[[float], None] = ask_head) -> None:
        self._note, self._ask = note, ask
        self._heard, self._told = time.monotonic(), False
        self.gone = ""
        """Why there is no head any more, in words; empty while there is, or may be."""

    def look(self) -> bool:
        """Ask once. Whether it is decided: it listens, or is gone."""
        try:
            self._ask(ANSWER)
        except AuthenticationError as error:
            self.gone = f"was started again, and knows nothing of this run ({str(error).partition('..')[0]})"
        except Exception as error:
            silent = time.monotonic() - self._heard
            if silent > TOLD and not self._told:
                self._note(f"the head does not listen ({error}): waiting, {SILENCE:g} s at most")
                self._told = True
            if silent > SILENCE:
                self.gone = f"has not listened for {silent:.0f} s"
            return bool(self.gone)
        else:
            self._heard, self._told = time.monotonic(), False
        return True

    def decide(self) -> None:
        """When something was lost: wait until it is known whether the head was, and raise HeadGone then."""
        while not self.gone and not self.look():
            time.sleep(PERIOD / 4)
        self.check()

    def check(self) -> None:
        """Raises HeadGone when it is."""
        if self.gone:
            raise HeadGone(f"the head of the Ray cluster {self.gone}")


@contextmanager
def watched(note: Callable[[str], None]) -> Iterator[HeadWatch]:
    """While the block lasts a thread looks."""
    watch, over = HeadWatch(note), threading.Event()

    def keep() -> None:
        while not over.wait(PERIOD) and not watch.gone:
            watch.look()

    thread = threading.Thread(target=keep, name="head-watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join(ANSWER)
