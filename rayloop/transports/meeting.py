"""A meeting at which the members of a process group find each other.

It is a TCP store of torch, on one interface, and only until all members have come. Such a store
asks for no key: any client may list, read and replace its content. So members prove by names that
only the secret gives that they were invited. The addresses of the members, which must stay secret,
are written when the store accepts no more connections.
"""

import os
import socket
import tempfile
import time
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import psutil
import torch.distributed as dist

_POLL_INTERVAL_S = 0.05
"""Seconds between two checks of which members have come."""


class Meeting:
    """One member's connection to a meeting.

    The ``first`` member opens it at ``host``, where port 0 means any free port; the others connect
    to its ``port``. No wait exceeds ``timeout`` seconds. Raises OSError or RuntimeError when it
    cannot be opened or reached.
    """

    def __init__(self, host: str, port: int, timeout: float, *, first: bool) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._first = first
        if not first:
            self._store = dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A socket that torch opens itself would listen on all interfaces.
        with socket.create_server((host, port), family=family) as listener:
            port = listener.getsockname()[1]
            # The socket closes with this block, so torch gets a descriptor that stays open.
            self._listener = os.dup(listener.fileno())
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=self._listener,
        )

    @property
    def port(self) -> int:
        """The port to which the others connect."""
        return int(self._store.port)

    def join(self, secret: str, size: int, rank: int | None = None) -> tuple[int, dist.Store]:
        """Wait for all of ``size`` members, who know the ``secret``.

        Returns the rank of this member, by default in the order of coming (the first has 0), and
        their store. Raises RuntimeError when a member is missing after the timeout, or a stranger
        is connected.
        """
        if self._first:
            self._admit(secret, size)
            return 0, dist.PrefixStore(secret, self._store)
        if rank is None:
            # The store counts up for one client at a time, so that no two members get one rank.
            rank = int(self._store.add(_name(secret, "joined"), 1))
        if rank >= size:
            # The others do not begin before this connection is closed.
            del self._store
            raise RuntimeError(f"{rank} receivers came to a meeting of {size - 1}")
        self._store.set(_name(secret, f"came {rank}"), "")
        # The addresses of the members must not be written while a stranger could still connect.
        self._store.wait([_name(secret, "begin")], self._timeout)
        return rank, dist.PrefixStore(secret, self._store)

    def _admit(self, secret: str, size: int) -> None:
        """Wait for the others, accept no more connections, and let the members begin."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        self._wait_for_members(secret, size, deadline)
        # No more connections before they are counted, or one could come after the count.
        self._stop_listening()
        self._wait_until_only(size, deadline)
        self._store.set(_name(secret, "begin"), "")

    def _wait_for_members(self, secret: str, size: int, deadline: float) -> None:
        names = [_name(secret, f"came {rank}") for rank in range(1, size)]
        while True:
            count = sum(self._store.check([name]) for name in names)
            if count == len(names):
                return
            if time.monotonic() > deadline:
                seconds = self._timeout.total_seconds()
                raise RuntimeError(
                    f"{count} of {len(names)} receivers came to the meeting within {seconds:g} s"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _wait_until_only(self, size: int, deadline: float) -> None:
        """Wait until the members alone are connected: a member too many leaves at once."""
        while True:
            peers = self._peers()
            if len(peers) <= size:
                return
            if time.monotonic() > deadline:
                addresses = ", ".join(sorted(peers))
                raise RuntimeError(
                    f"{len(peers)} connections to a meeting of {size}, one of them a stranger's:"
                    f" {addresses}"
                )
            time.sleep(_POLL_INTERVAL_S)

    def _stop_listening(self) -> None:
        """Accept no more connections; the existing ones stay.

        Torch's server waits on the socket that listens, and spins when that is shut down. So its
        descriptor becomes another socket, to which no process can connect.
        """
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as unreachable:
            unreachable.bind(str(Path(folder) / "s"))
            unreachable.listen()
            unreachable.setblocking(False)
            # dup2 replaces the listening socket in one step: torch keeps polling the same number.
            os.dup2(unreachable.fileno(), self._listener)

    def _peers(self) -> list[str]:
        """The addresses of the store's clients, of which the first member is one."""
        addresses = []
        for connection in psutil.Process().net_connections("tcp"):
            is_to_store = connection.laddr and connection.laddr.port == self.port
            is_established = connection.raddr and connection.status == psutil.CONN_ESTABLISHED
            if is_to_store and is_established:
                addresses.append(f"{connection.raddr.ip}:{connection.raddr.port}")
        return addresses


def _name(secret: str, what: str) -> str:
    """A key of the store that cannot be guessed, and that does not reveal the secret."""
    return blake2b(what.encode(), key=secret.encode(), digest_size=16).hexdigest()
