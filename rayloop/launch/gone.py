"""When a node stops waiting for its head, and a head for its own entry.

An entry that cannot be read is a fault of the file system and changes nothing. A head that does not listen gets as long as Ray
itself gives it: a network may come back, and a head restarts Ray.
"""

from __future__ import annotations

import time

from rayloop.launch.rendezvous import Head, Rendezvous

SILENCE = 60.0
"""Seconds without an accepted connection after which a head counts as gone. Ray's own processes give up after as many
(``RAY_gcs_rpc_server_reconnect_timeout_s``)."""
UNPUBLISHED = 600.0
"""Seconds after which a head ends that cannot publish its entry: no new node can find it meanwhile."""
WAITS = 5.0
"""Seconds that a problem lasts before it is reported."""


class Gone:
    """Whether a head has left: another one is published, its work is done, it began to leave and does not listen any more, or it
    has not listened for SILENCE seconds. ``saves``: a program runs here, which must save as soon as the head begins to leave.

    Raises ConfigError when others may write the rendezvous folder.
    """

    def __init__(self, place: Rendezvous, joined: Head, saves: bool) -> None:
        self._place, self._joined, self._saves = place, joined, saves
        self._heard = time.monotonic()
        self._report = Report(WAITS)

    def __call__(self) -> bool:
        """Look once."""
        seen, listens = self._place.seen(), self._joined.accepts()
        if isinstance(seen, Head) and seen != self._joined:
            return True
        left = False
        if isinstance(seen, str):
            left = self._place.left(self._joined)
            if self._place.done(self._joined) or (left and self._saves):
                return True
        if listens:
            self._heard = time.monotonic()
            unreadable = isinstance(seen, str) and not left
            self._report(f"{seen}; {self._joined.address} still listens, and this node stays" if unreadable else "")
            return False
        self._report(f"{self._joined.address} accepts no connection: waiting, {SILENCE:g} s at most")
        return left or time.monotonic() - self._heard > SILENCE

    def replaced(self) -> bool:
        """Whether another head is published: the state of the joined one is lost."""
        return self._place.head() not in (self._joined, None)


class Unpublished:
    """Of a head: whether another one is published in its place, or its own entry could not be published for UNPUBLISHED seconds.
    A missing entry is written again."""

    def __init__(self, place: Rendezvous, me: Head) -> None:
        self._place, self._me = place, me
        self._there = time.monotonic()
        self._report = Report(0.0)
        self.why = ""
        """The reason in words, once there is one."""

    def __call__(self) -> bool:
        """Look once. Raises ConfigError when others may write the rendezvous folder."""
        seen = self._place.seen()
        if seen == self._me:
            self._there = time.monotonic()
            self._report("")
            return False
        if isinstance(seen, Head):
            self.why = f"{self._place.folder} has another head's entry, that of {seen.address} on {seen.node}"
            return True
        self._report(f"{seen}; it is written again, this head goes on")
        try:
            self._place.publish(self._me)
        except OSError as error:
            self.why = f"its entry in {self._place.folder} could not be published for {UNPUBLISHED:g} s: {error}"
        return time.monotonic() - self._there > UNPUBLISHED


class Report:
    """Prints a problem once, when it has lasted for ``waits`` seconds, and once that it is over."""

    def __init__(self, waits: float) -> None:
        self._waits = waits
        self._since: float | None = None
        self._printed = False

    def __call__(self, trouble: str) -> None:
        """``trouble`` in words; "" for none."""
        if not trouble:
            if self._printed:
                print("node: that is over", flush=True)
            self._since, self._printed = None, False
            return
        self._since = time.monotonic() if self._since is None else self._since
        if not self._printed and time.monotonic() - self._since >= self._waits:
            self._printed = True
            print(f"node: {trouble}", flush=True)
