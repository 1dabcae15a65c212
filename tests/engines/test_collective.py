"""Weight update by broadcast over gloo: who is invited gets the bytes, and nobody waits long for
who does not come.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rayloop.core.failures import BroadcastFailed, WeightSyncError
from rayloop.core.protocols import Manifest
from rayloop.core.types import Version
from rayloop.transports.collective import BroadcastReceiver, BroadcastSender, buckets
from rayloop.transports.manifest import manifest
from rayloop.transports.process_group import RAISING, Membership
from rayloop.transports.settings import CollectiveTransport

SETTINGS = CollectiveTransport().within(5.0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveTransport, "bucket_bytes", 1024)


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(3, 5), (), (7,), (40, 40), (2, 3)]
    return {
        f"layer.{i}": (
            torch.randn(size, generator=generator).to((torch.float32, torch.bfloat16)[i % 2])
        )
        for i, size in enumerate(sizes)
    }


class Hall:
    """A sender and receivers, each with a thread of its own; ``serial`` is a receiver's number in
    the pool.
    """

    def __init__(self) -> None:
        self.sender = BroadcastSender(SETTINGS, "127.0.0.1")
        self.receivers: dict[int, BroadcastReceiver] = {}
        self.failures = 0

    def sync_weights(
        self,
        invited: Sequence[int],
        present: Sequence[int] | None = None,
        weights: Iterator[tuple[str, Tensor]] | None = None,
        seed: int = 0,
        timeout: float = SETTINGS.timeout,
    ) -> list[Any]:
        """What the sender (None) and each present receiver (tensors) returned or raised."""
        version = Version(0, seed)
        meeting = self.sender.invite(tuple(invited), self.failures, timeout)
        with ThreadPoolExecutor() as threads:
            sending = threads.submit(
                self.sender.send, version, weights or tensors(seed).items(), meeting
            )
            receiving = [
                threads.submit(
                    self.receivers.setdefault(serial, BroadcastReceiver(SETTINGS)).deserialize,
                    Manifest(version, {}),
                    meeting,
                )
                for serial in (invited if present is None else present)
            ]
            return [future.exception() or future.result() for future in [sending, *receiving]]


def differing(received: dict[str, Tensor], seed: int = 0) -> list[str]:
    """The names of tensors that are not those that were sent; all names, when they are others or in
    another order.
    """
    sent = tensors(seed)
    if list(received) != list(sent):
        return list(sent)
    same = {
        name: received[name].dtype == t.dtype and torch.equal(received[name], t)
        for name, t in sent.items()
    }
    return [name for name, is_same in same.items() if not is_same]


def test_buckets_hold_every_tensor_once_within_the_limit() -> None:
    plan = [
        (len(bucket), tensors)
        for bucket, tensors in buckets(tensors().items(), 1024, torch.device("cpu"))
    ]
    assert [list(held) for _, held in plan] == [
        ["layer.0", "layer.1", "layer.2"],
        ["layer.3"],
        ["layer.4"],
    ]
    assert [size for size, _ in plan] == [112, 3200, 32]
    assert [tensor.storage_offset() * tensor.itemsize for tensor in plan[0][1].values()] == [
        0,
        64,
        80,
    ]
    for _, held in plan:
        assert not [
            name for name, tensor in held.items() if not torch.equal(tensor, tensors()[name])
        ]
    assert [list(held) for _, held in buckets(tensors().items(), 10**6, torch.device("cpu"))] == [
        list(tensors())
    ]


def test_a_bucket_is_sent_before_the_next_tensors_are_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And each tensor is gone by then, but for the last one: a sender holds no more than that and
    the buckets.
    """
    hall, log, held = Hall(), list[str](), list[weakref.ref[Tensor]]()
    send_bucket = hall.sender._send_bucket
    monkeypatch.setattr(
        hall.sender,
        "_send_bucket",
        lambda *buckets_sent: (
            log.append(",".join(buckets_sent[0]) if buckets_sent else "end"),
            send_bucket(*buckets_sent),
        ),
    )

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name in tensors():
            assert sum(one() is not None for one in held) <= 1
            tensor = tensors()[name]
            held.append(weakref.ref(tensor))
            log.append(name)
            yield name, tensor

    none, received = hall.sync_weights([1], weights=gathered())
    assert none is None
    assert not differing(received)
    assert log == [
        "layer.0",
        "layer.1",
        "layer.2",
        "layer.3",
        "layer.0,layer.1,layer.2",
        "layer.4",
        "layer.3",
        "layer.4",
        "end",
    ]


def test_every_receiver_gets_every_weight_update_in_one_group() -> None:
    hall, groups = Hall(), set()
    for seed in (1, 2, 3):
        none, *received = hall.sync_weights([7, 8, 9], seed=seed)
        assert none is None
        for tensors_of_one in received:
            assert not differing(tensors_of_one, seed)
        groups.add(hall.sender._membership._group)
    assert len(groups) == 1, "the same members keep their group"


def test_the_group_follows_its_members() -> None:
    hall = Hall()
    for seed, members in enumerate([[1, 2], [2], [2, 3, 4], [4], []]):
        none, *received = hall.sync_weights(members, seed=seed)
        assert none is None
        assert len(received) == len(members)
        for tensors_of_one in received:
            assert not differing(tensors_of_one, seed)


def test_a_receiver_that_does_not_come_fails_the_broadcast_and_the_next_one_is_among_the_others() -> (
    None
):
    hall = Hall()
    hall.sync_weights([1, 2])
    for failure in hall.sync_weights([1, 2, 3], present=[1, 2]):
        assert isinstance(failure, BroadcastFailed), failure
    _, *received = hall.sync_weights([1, 2], seed=5)
    for tensors_of_one in received:
        assert not differing(tensors_of_one, 5)


def test_a_member_that_left_its_group_fails_the_broadcast_until_a_new_group_is_formed() -> None:
    hall = Hall()
    hall.sync_weights([1, 2])
    hall.receivers[2]._membership.leave()
    assert any(isinstance(end, BroadcastFailed) for end in hall.sync_weights([1, 2]))
    hall.failures += 1
    _, *received = hall.sync_weights([1, 2], seed=5)
    for tensors_of_one in received:
        assert not differing(tensors_of_one, 5)


def test_one_too_many_is_turned_away_and_the_others_are_served() -> None:
    ends = Hall().sync_weights([1, 2], present=[1, 2, 3])
    [turned_away] = [end for end in ends if isinstance(end, BroadcastFailed)]
    assert "3 receivers came to a meeting of 2" in str(turned_away)
    for tensors_of_one in [end for end in ends[1:] if end is not turned_away]:
        assert not differing(tensors_of_one)


def test_damaged_bytes_are_named_and_the_others_of_the_group_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hall = Hall()
    monkeypatch.setitem(hall.receivers, 1, BroadcastReceiver(SETTINGS))
    buckets_sent = hall.receivers[1]._receive_bucket

    def damaged() -> Any:
        if (found := buckets_sent()) and "layer.3" in found[0]:
            found[1][17] ^= 1
        return found

    monkeypatch.setattr(hall.receivers[1], "_receive_bucket", damaged)
    none, refused, received = hall.sync_weights([1, 2])
    assert none is None
    assert isinstance(refused, WeightSyncError)
    assert "1 tensors did not arrive as sent: layer.3: corrupt" in str(refused)
    assert not differing(received)


def test_the_copy_is_made_once_also_when_the_broadcast_fails() -> None:
    """With the checksums of what was sent."""
    hall = Hall()
    assert isinstance(hall.sync_weights([1, 2], present=[1])[0], BroadcastFailed)
    update = hall.sender.sent()
    assert update.manifest == manifest(Version(0, 0), tensors())
    assert not differing(
        dict(BroadcastReceiver(SETTINGS).deserialize(update.manifest, update.source))
    )


def test_what_cannot_be_gathered_ends_the_broadcast_at_once() -> None:
    def gathered() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors().items())[:-1]
        raise RuntimeError("a rank is gone")

    began = time.monotonic()
    error, failed = Hall().sync_weights([1], weights=gathered())
    assert str(error) == "a rank is gone", "the trainer's, not the broadcast's"
    assert isinstance(failed, BroadcastFailed)
    assert time.monotonic() - began < SETTINGS.timeout


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, str | None]]]:
    """In place of NCCL's constructor: the rank and the environment of each call."""
    calls: list[tuple[int, dict[str, str | None]]] = []

    def made(store: dist.Store, rank: int, size: int, timeout: object) -> object:
        calls.append((rank, {name: os.environ.get(name) for name in RAISING}))
        return object()

    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "mine")
    return calls


def test_a_communicator_of_nccl_is_made_when_all_have_come_and_raises_instead_of_ending_processes(
    nccl: list[tuple[int, dict[str, str | None]]],
) -> None:
    first, second = Membership("nccl"), Membership("nccl")
    port = first.serve("127.0.0.1", 5.0)
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(first.join, "127.0.0.1", port, "both", 2, 5.0)
        time.sleep(0.2)
        assert not nccl, "nothing that cannot be interrupted begins before the second has come"
        second.join("127.0.0.1", port, "both", 2, 5.0)
        joining.result()
    assert sorted(rank for rank, _ in nccl) == [0, 1]
    assert [seen for _, seen in nccl] == [RAISING, RAISING]
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "mine"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_who_waits_in_vain_for_a_member_of_nccl_fails_within_the_timeout(
    nccl: list[tuple[int, dict[str, str | None]]],
) -> None:
    first, second = Membership("nccl"), Membership("nccl")
    port = first.serve("127.0.0.1", 0.5)
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(first.join, "127.0.0.1", port, "three", 3, 0.5)
        with pytest.raises(RuntimeError):
            second.join("127.0.0.1", port, "three", 3, 0.5)
        with pytest.raises(
            RuntimeError, match=r"1 of 2 receivers came to the meeting within 0\.5 s"
        ):
            joining.result()
    assert time.monotonic() - began < 3
    assert not nccl


def test_a_wait_lasts_as_long_as_the_invitation_says_and_leaving_no_longer() -> None:
    hall = Hall()
    assert differing(hall.sync_weights([1])[1]) == []
    began = time.monotonic()
    failed, *_ = hall.sync_weights([1], present=[], timeout=0.2)
    hall.sender._membership.leave()
    assert isinstance(failed, BroadcastFailed)
    assert time.monotonic() - began < 0.8, "not the 1 s of the group's constructor"


def test_the_members_of_a_new_group_wait_as_long_as_the_settings_say() -> None:
    hall = Hall()
    assert hall.sender.invite((1,), 0, 0.2).timeout == SETTINGS.timeout
    assert hall.sender.invite((1,), 0, 0.2).timeout == 0.2
    assert hall.sender.invite((1, 2), 0, 0.2).timeout == SETTINGS.timeout
    assert hall.sender.invite((1, 2), 1, 0.2).timeout == SETTINGS.timeout
