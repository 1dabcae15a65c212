"""Where ranks and engines meet: on one interface; a stranger who connects learns nothing, takes no
place and gets no weights.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from rayloop.core.failures import BroadcastFailed
from rayloop.core.types import Version
from rayloop.transports.collective import BroadcastGroup, BroadcastReceiver, BroadcastSender
from rayloop.transports.meeting import Meeting
from rayloop.transports.settings import CollectiveTransport

SECRET = "5ec3e7" * 5


def listening(port: int) -> set[str]:
    """The addresses at which this process listens on a port."""
    own = psutil.Process().net_connections("tcp")
    return {
        one.laddr.ip for one in own if one.laddr.port == port and one.status == psutil.CONN_LISTEN
    }


def stranger(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))


def keys(store: Any) -> list[str]:
    return [key if isinstance(key, str) else key.decode() for key in store.list_keys()]


@pytest.fixture
def meeting() -> Meeting:
    return Meeting("127.0.0.1", 0, 2.0, first=True)


def test_it_listens_on_its_own_interface_only(meeting: Meeting) -> None:
    assert listening(meeting.port) == {"127.0.0.1"}


def test_all_who_know_the_secret_meet_and_share_a_store(meeting: Meeting) -> None:
    others = [Meeting("127.0.0.1", meeting.port, 5.0, first=False) for _ in range(2)]
    with ThreadPoolExecutor() as threads:
        joined = [threads.submit(one.join, SECRET, 3) for one in (meeting, *others)]
        found = [one.result() for one in joined]
    assert sorted(rank for rank, _ in found) == [0, 1, 2]
    found[1][1].set("address", "here")
    assert [store.get("address") for _, store in found] == [b"here"] * 3


def test_nobody_can_connect_once_all_have_come(meeting: Meeting) -> None:
    other = Meeting("127.0.0.1", meeting.port, 5.0, first=False)
    with ThreadPoolExecutor() as threads:
        joined = [threads.submit(one.join, SECRET, 2) for one in (meeting, other)]
        stores = [one.result()[1] for one in joined]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", meeting.port), timeout=2)
    assert not listening(meeting.port)
    stores[1].set("later", "1")
    assert stores[0].get("later") == b"1", "who has come stays"


def test_the_server_waits_once_nobody_can_connect() -> None:
    """A server that spins uses the processor all the time.

    The threads that served this process before are not counted: they have their own work.
    """
    process = psutil.Process()
    others = {thread.id for thread in process.threads()}
    first = Meeting("127.0.0.1", 0, 5.0, first=True)
    second = Meeting("127.0.0.1", first.port, 5.0, first=False)
    with ThreadPoolExecutor() as threads:
        joined = [threads.submit(one.join, SECRET, 2) for one in (first, second)]
        stores = [one.result()[1] for one in joined]

    def busy_s() -> float:
        new = [thread for thread in process.threads() if thread.id not in others]
        return sum(thread.user_time + thread.system_time for thread in new)

    before = busy_s()
    time.sleep(1.0)
    assert busy_s() - before < 0.1
    assert len(stores) == 2, "the stores, and so the server, live until here"


def test_a_stranger_reads_no_secret_and_holds_the_meeting_up_only(meeting: Meeting) -> None:
    seen = list[str]()
    other = Meeting("127.0.0.1", meeting.port, 2.5, first=False)
    theirs = stranger(meeting.port)
    with ThreadPoolExecutor() as threads:
        waiting, opened = (
            threads.submit(other.join, SECRET, 2),
            threads.submit(meeting.join, SECRET, 2),
        )
        with pytest.raises(RuntimeError, match="one of them a stranger's"):
            opened.result()
        seen += keys(theirs)
        with pytest.raises(RuntimeError):
            waiting.result()
    assert len(seen) == 2, "one has joined and come"
    assert not [
        key for key in seen if SECRET in key or not re.fullmatch("[0-9a-f]{32}", key.strip("/"))
    ]


def test_one_who_leaves_before_all_have_come_does_no_harm(meeting: Meeting) -> None:
    other = Meeting("127.0.0.1", meeting.port, 5.0, first=False)
    theirs = [stranger(meeting.port)]
    with ThreadPoolExecutor() as threads:
        joined = [threads.submit(one.join, SECRET, 2) for one in (meeting, other)]
        threading.Timer(0.3, theirs.clear).start()
        assert sorted(one.result()[0] for one in joined) == [0, 1]


def test_what_a_stranger_can_see_gives_him_no_place_and_no_weights() -> None:
    """He repeats what others have written, under every name that he can read, while the second
    engine has not come.
    """
    settings = CollectiveTransport().within(10.0)
    sender = BroadcastSender(settings, "127.0.0.1")
    group = sender.invite((1, 2), 0, settings.timeout)
    assert group.name not in repr(group)
    tensors = {"model.secret": torch.ones(3)}
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(sender.send, Version(0, 1), tensors.items(), group)
        first = threads.submit(
            lambda: dict(BroadcastReceiver(settings).stream(Version(0, 1), group))
        )
        store = stranger(group.port)
        while len(keys(store)) < 2:
            time.sleep(0.02)
        for guess in {
            part for key in keys(store) for part in (key, key.split("/")[0], key.strip("/"))
        }:
            theirs = BroadcastGroup("127.0.0.1", group.port, guess[:64], 3, 0.4)
            with pytest.raises(BroadcastFailed):
                dict(BroadcastReceiver(settings).stream(Version(0, 1), theirs))
        for failed in (sending, first):
            with pytest.raises(BroadcastFailed):
                failed.result()


def test_a_place_that_cannot_be_had_raises() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        Meeting("127.0.0.1", taken.getsockname()[1], 1.0, first=True)
