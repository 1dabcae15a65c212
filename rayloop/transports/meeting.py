"""Where the members of a process group find each other: a TCP store of torch, on one interface, and
only until all have come.

Such a store asks for no key: who connects may list, read and replace what is in it. So members show
by names that only the secret gives that they were invited. What is worth something, the addresses
of the members, is written when the store admits nobody else.
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

LOOK = 0.05
"""Seconds between two checks of which members have come."""


class Meeting:
    """One member's way into a meeting.

    The ``first`` member opens it at ``host``, where port 0 is any free one; the others reach it at
    its ``port``. No wait exceeds ``timeout`` seconds. Raises OSError or RuntimeError when it cannot
    be opened or reached.
    """

    def __init__(self, host: str, port: int, timeout: float, *, first: bool) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._first = first
        if not first:
            self._store = dist.TCPStore(host, port, is_master=False, timeout=self._timeout)
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server(
            (host, port), family=family
        ) as listening:  # torch's own would listen on all interfaces
            port = listening.getsockname()[1]
            # The socket closes with this block, so torch gets a descriptor that stays open.
            self._door = os.dup(listening.fileno())
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=self._door,
        )

    @property
    def port(self) -> int:
        """Where the others reach it."""
        return int(self._store.port)

    def join(self, secret: str, size: int, rank: int | None = None) -> tuple[int, dist.Store]:
        """Wait for all of ``size`` members, who know the ``secret``.

        Returns this one's rank, by default in the order of coming (the first has 0), and their
        store. Raises RuntimeError when somebody is missing after the timeout, or a stranger is in.
        """
        if self._first:
            self._admit(secret, size)
            return 0, dist.PrefixStore(secret, self._store)
        if rank is None:
            # The store counts up for one client at a time, so that no two members get one rank.
            rank = int(self._store.add(_name(secret, "joined"), 1))
        if rank >= size:
            del self._store  # the others do not begin before this connection is closed
            raise RuntimeError(f"{rank} receivers came to a meeting of {size - 1}")
        self._store.set(_name(secret, f"came {rank}"), "")
        # The addresses of the members must not be written while a stranger could still connect.
        self._store.wait([_name(secret, "begin")], self._timeout)
        return rank, dist.PrefixStore(secret, self._store)

    def _admit(self, secret: str, size: int) -> None:
        """Wait until the others are there, admit nobody else, and let them begin."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        names = [_name(secret, f"came {other}") for other in range(1, size)]
        while (came := sum(self._store.check([name]) for name in names)) < len(names):
            if time.monotonic() > deadline:
                within = self._timeout.total_seconds()
                raise RuntimeError(
                    f"{came} of {len(names)} receivers came to the meeting within {within:g} s"
                )
            time.sleep(LOOK)

        # The door is shut before connections are counted, or one could slip in after the count.
        self._close()
        while len(guests := self._guests()) > size:  # one too many of ours leaves at once
            if time.monotonic() > deadline:
                who = ", ".join(sorted(guests))
                raise RuntimeError(
                    f"{len(guests)} connections to a meeting of {size}, one of them a stranger's:"
                    f" {who}"
                )
            time.sleep(LOOK)
        self._store.set(_name(secret, "begin"), "")

    def _close(self) -> None:
        """Let nobody else connect; who has come stays.

        Torch's server waits on the socket that listens, and spins when that is shut down. So its
        descriptor becomes another socket, which has no name and to which nobody can connect.
        """
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as nobody:
            nobody.bind(str(Path(folder) / "s"))
            nobody.listen()
            nobody.setblocking(False)
            # dup2 replaces the listening socket in one step:
            # torch's poll goes on with the same number.
            os.dup2(nobody.fileno(), self._door)

    def _guests(self) -> list[str]:
        """From where the connections come that the store has, the first member's own among them."""
        known = [
            one
            for one in psutil.Process().net_connections("tcp")
            if one.laddr and one.laddr.port == self.port
        ]
        return [
            f"{one.raddr.ip}:{one.raddr.port}"
            for one in known
            if one.raddr and one.status == psutil.CONN_ESTABLISHED
        ]


def _name(secret: str, what: str) -> str:
    """A key of the store that nobody can guess, and from which the secret does not follow."""
    return blake2b(what.encode(), key=secret.encode(), digest_size=16).hexdigest()
