"""What the process from which interpreters are forked does when the system refuses."""

from __future__ import annotations

import json
import os
import socket

import pytest

from rayloop.sandbox import kernel
from rayloop.sandbox.server import ForkServer


def test_a_refused_fork_leaves_the_server_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    where = ["home"]

    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(kernel, "unshare", lambda flags: where.append("new"))
    monkeypatch.setattr(kernel, "set_namespace", lambda descriptor, flags: where.append("home"))
    monkeypatch.setattr(os, "fork", refused)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = ForkServer({"folder": "/tmp"}, theirs, home=7)
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            server._spawn({"user": None})
            assert "fork refused: " in json.loads(ours.recv(1 << 16))["error"]
            assert where[-1] == "home"
        assert len(os.listdir("/proc/self/fd")) == descriptors
