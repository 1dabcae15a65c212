"""When a node takes its head for gone. An unreadable entry is a matter of the file system and changes nothing; a head that does not
listen is given as long as Ray itself gives it, for a network that comes back and for a head that starts Ray again."""

from __future__ import annotations

import time

from rayloop.launch.rendezvous import Head, Rendezvous

SILENCE = 60.0
"""Seconds without an accepted connection after which a head is gone that did not take leave: Ray's own processes give up after as
many (``RAY_gcs_rpc_server_reconnect_timeout_s``)."""
UNPUBLISHED = 600.0
"""Seconds that a head goes on without being able to publish where it is: who comes meanwhile cannot find it."""
WAITS = 5.0
"""Seconds after which it is told that something is waited for."""


class Gone:
    """Whether a head has left: another one is published, its work is done, it began to leave and does not listen any more, or it
    has not listened for SILENCE seconds. ``saves``: there is a program here, which has to save as soon as the head begins to leave.

    Raises ConfigError when others may write the rendezvous folder.
    """

    def __init__(self, place: Rendezvous, joined: Head, saves: bool) -> None:
        self._place, self._joined, self._saves = place, joined, saves
        self._heard = time.monotonic()
        self._told = Told()

    def __call__(self) -> bool:
        """Look once."""
        seen, listens = self._place.seen(), self._joined.accepts()
        if isinstance(seen, Head):
            if seen != self._joined:
                return True
            left, trouble = False, ""
        else:
            if self._place.done(self._joined):
                return True
            left, trouble = self._place.left(self._joined), seen
            if left and self._saves:
                return True
        if listens:
            self._heard = time.monotonic()
            self._told("" if left or not trouble else f"{trouble}; {self._joined.address} still listens, and this node stays")
            return False
        self._told(f"{self._joined.address} accepts no connection: waiting, {SILENCE:g} s at most")
        return left or time.monotonic() - self._heard > SILENCE

    def replaced(self) -> bool:
        """Whether another head is published: what this one knew of the cluster is lost."""
        return self._place.head() not in (self._joined, None)


class Unpublished:
    """Of a head: whether another one is published in its place, or its own entry could not be published for UNPUBLISHED seconds.
    An entry that is missing is written again."""

    def __init__(self, place: Rendezvous, me: Head) -> None:
        self._place, self._me = place, me
        self._there = time.monotonic()
        self._told = Told(0.0)
        self.why = ""
        """In words, when it is."""

    def __call__(self) -> bool:
        """Look once. Raises ConfigError when others may write the rendezvous folder."""
        seen = self._place.seen()
        if seen == self._me:
            self._there = time.monotonic()
            self._told("")
            return False
        if isinstance(seen, Head):
            self.why = f"{self._place.folder} has another head's entry, that of {seen.address} on {seen.node}"
            return True
        self._told(f"{seen}; it is written again, this head goes on")
        try:
            self._place.publish(self._me)
        except OSError as error:
            self.why = f"its entry in {self._place.folder} could not be published for {UNPUBLISHED:g} s: {error}"
        return time.monotonic() - self._there > UNPUBLISHED


class Told:
    """Says once what is wrong, when that has lasted for ``waits`` seconds, and once that it is over."""

    def __init__(self, waits: float = WAITS) -> None:
        self._waits = waits
        self._since: float | None = None
        self._said = False

    def __call__(self, trouble: str) -> None:
        """``trouble``: in words; empty: there is none."""
        if not trouble:
            if self._said:
                print("node: that is over", flush=True)
            self._since, self._said = None, False
            return
        if self._since is None:
            self._since = time.monotonic()
        if not self._said and time.monotonic() - self._since >= self._waits:
            self._said = True
            print(f"node: {trouble}", flush=True)
