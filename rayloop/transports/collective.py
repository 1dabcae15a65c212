"""Weights by broadcast from the policy's first rank, bucket by bucket as they are gathered, to the
processes of vLLM or SGLang, or, for engines that cannot, to the rollout actors; when a broadcast
fails, through the object store.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from rayloop.core.failures import BroadcastFailed, PolicyLost
from rayloop.core.protocols import GenerationEngine, Manifest, StreamingEngine, TensorRecord
from rayloop.core.types import Version
from rayloop.transports.plain import ArrayReceiver, Arrays, ArraySender
from rayloop.transports.seam import (
    Receiver,
    Rollouts,
    Sender,
    WeightExporter,
    WeightTransport,
    WeightUpdate,
    paused,
)
from rayloop.transports.settings import BroadcastTransport

if TYPE_CHECKING:
    import torch
    from torch import Tensor


ALIGNMENT = 16
"""Bytes; tensors of any dtype start at a multiple of it within a bucket."""


def _room(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def buckets(
    weights: Iterable[tuple[str, Tensor]], limit: int, device: torch.device
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Copies tensors, as they come, into buckets of at most ``limit`` bytes on ``device``; a larger
    tensor is alone. Yields the bytes of each bucket, and its tensors [name] as views of them.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    bucket, used = torch.empty(0), 0
    for name, tensor in weights:
        if tensors and used + _room(tensor.nbytes) > limit:
            yield bucket[:used], tensors
            tensors = {}
        if not tensors:
            used, size = 0, max(_room(tensor.nbytes), limit)
            # Each bucket has memory of its own: on a CPU the object store's copy is the bucket
            # itself. Pinned memory lets the copy from a GPU run by itself.
            bucket = torch.empty(
                size,
                dtype=torch.uint8,
                device=device,
                pin_memory=device.type == "cpu" != tensor.device.type,
            )
        tensors[name] = (
            bucket[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        )
        used += _room(tensor.nbytes)
    if tensors:
        yield bucket[:used], tensors


def views(bucket: Tensor, records: Mapping[str, TensorRecord]) -> dict[str, Tensor]:
    """The tensors [name] of a bucket, in its memory."""
    from rayloop.transports.manifest import DTYPES

    found: dict[str, Tensor] = {}
    start = 0
    for name, record in records.items():
        found[name] = (
            bucket[start : start + record.nbytes].view(DTYPES[record.dtype]).view(record.shape)
        )
        start += _room(record.nbytes)
    return found


@dataclass(frozen=True, slots=True)
class BroadcastGroup:
    """How ``size`` members of the process group find each other: at ``host:port``, by the ``name``,
    which only they know.
    """

    host: str
    port: int
    name: str = field(repr=False)
    size: int


class Collective(WeightTransport[Arrays | BroadcastGroup]):
    """The object store gets the copy that is made on the way, once the engines go on: for those
    that start later, and for all when a broadcast fails.
    """

    def __init__(self, settings: BroadcastTransport, folder: str) -> None:
        super().__init__(settings, folder)
        self._failures = 0
        self._copy: asyncio.Task[WeightUpdate[Any]] | None = None

    def sender(self, host: str) -> BroadcastSender:
        """The rank's half; it opens the store at ``host``."""
        return BroadcastSender(self.settings, host)

    def receiver(self) -> BroadcastReceiver:
        """The rollout actor's half, and that of each process of its engine."""
        return BroadcastReceiver(self.settings)

    async def deliver(self, policy: WeightExporter, rollouts: Rollouts, version: Version) -> None:
        """Broadcasts to the engines in service, in a new process group if they have changed or the
        last broadcast failed; falls back to the object store. Raises PolicyLost, WeightSyncError
        for damaged weights, and what the last copy raised.
        """
        # The last copy must end before its arrays are replaced. Its failure counts, unless the
        # policy was lost, which the next call finds out by itself.
        if self._copy is not None:
            await asyncio.wait({self._copy})
            with suppress(PolicyLost, asyncio.CancelledError):
                self._copy.result()
        meeting = await policy.ask(BroadcastSender.invite, rollouts.members, self._failures)
        sending = asyncio.ensure_future(policy.send(version, meeting))
        # It exports once the sending has ended: the sender
        # then has the copy, of a failed broadcast, too.
        self._copy = asyncio.create_task(_copied(policy, version, sending))
        # It comes before the first load: an engine that starts
        # meanwhile was not invited, and takes the copy.
        rollouts.keep(WeightUpdate(Manifest(version, {}), self._copy))
        receiving = rollouts.load(WeightUpdate(Manifest(version, {}), meeting))
        try:
            # Both are awaited, and the sender's error counts
            # first: a lost policy fails the receivers as well.
            for end in await asyncio.gather(sending, receiving, return_exceptions=True):
                if isinstance(end, BaseException):
                    raise end
        except BroadcastFailed as error:
            self._failures += 1
            rollouts.fell_back(version, error)
            # shield: a cancelled delivery must leave the copy to the engines that wait for it.
            await rollouts.load(await asyncio.shield(self._copy))


async def _copied(
    policy: WeightExporter, version: Version, sending: asyncio.Future[Any]
) -> WeightUpdate[Any]:
    with suppress(BroadcastFailed):
        await asyncio.shield(sending)
    return await policy.export(version)


class BroadcastSender(Sender[Arrays | BroadcastGroup]):
    """Broadcasts what is gathered, and keeps a copy in the host's memory for the object store."""

    def __init__(self, settings: BroadcastTransport, host: str) -> None:
        from rayloop.transports.process_group import Membership

        self._settings, self._host = settings, host
        self._membership = Membership(settings.backend, settings.timeout)
        self._meeting: BroadcastGroup | None = None
        self._invited: tuple[tuple[int, ...], int] | None = None
        self._copying: torch.cuda.Stream | None = None
        self._sent: WeightUpdate[Arrays | BroadcastGroup] | None = None

    def pack(
        self, version: Version, tensors: Mapping[str, Tensor]
    ) -> WeightUpdate[Arrays | BroadcastGroup]:
        """Same as ``ArraySender.pack``."""
        packed = ArraySender().pack(version, tensors)
        return WeightUpdate(packed.manifest, packed.source)

    def invite(self, engines: tuple[int, ...], failures: int) -> BroadcastGroup:
        """Returns the group for this rank and the engines with these serial numbers.

        It is the existing group unless the engines or the number of failed broadcasts have changed.
        """
        if self._meeting is None or self._invited != (engines, failures):
            self._invited = (engines, failures)
            size = 1 + len(engines) * max(1, self._settings.workers)
            port = self._membership.serve(self._host)
            # Each group has a random name: a late member
            # of an earlier one finds no place in this one.
            self._meeting = BroadcastGroup(self._host, port, secrets.token_hex(16), size)
        return self._meeting

    def send(
        self, version: Version, weights: Iterable[tuple[str, Tensor]], meeting: BroadcastGroup
    ) -> None:
        """Broadcast them to the group.

        When that fails they are copied all the same. Raises BroadcastFailed, and what ``weights``
        raises.
        """
        from rayloop.transports.manifest import manifest, raw

        membership, records, arrays = self._membership, dict[str, TensorRecord](), dict[str, Any]()
        broken: list[RuntimeError] = []

        # Weights must be gathered to their end on all ranks,
        # so a failed broadcast only stops the sending.
        def attempt(step: Callable[..., None], *arguments: Any) -> None:
            try:
                if not broken:
                    step(*arguments)
            except RuntimeError as error:
                broken.append(error)
                self._leave()

        try:
            attempt(membership.join, meeting.host, meeting.port, meeting.name, meeting.size)
            for bucket, tensors in buckets(weights, self._settings.bucket_bytes, membership.device):
                described = manifest(version, tensors).tensors
                copy = self._copied(bucket)
                attempt(self._send_bucket, described, bucket)
                records |= described
                arrays |= {name: raw(tensor) for name, tensor in views(copy, described).items()}
            attempt(self._send_bucket)
        except BaseException:
            self._leave()  # the receivers need not wait
            raise
        if self._copying is not None:
            self._copying.synchronize()
        self._sent = WeightUpdate(Manifest(version, records), arrays)
        if broken:
            raise BroadcastFailed(
                f"version {version}: could not send the broadcast: {broken[0]}"
            ) from broken[0]

    def sent(self) -> WeightUpdate[Arrays | BroadcastGroup]:
        """The copy of what was sent last, once."""
        assert self._sent is not None
        update, self._sent = self._sent, None
        return update

    def _leave(self) -> None:
        self._membership.leave()
        self._meeting = None

    def _send_bucket(
        self, records: Mapping[str, TensorRecord] | None = None, bucket: Tensor | None = None
    ) -> None:
        """Broadcast two numbers of bytes, a description and a bucket of so many bytes.

        Two zeros end the weights.
        """
        import torch

        membership = self._membership
        text = (
            json.dumps({name: astuple(record) for name, record in records.items()}).encode()
            if records
            else b""
        )
        sizes = [len(text), 0 if bucket is None else bucket.nbytes]
        membership.broadcast(torch.tensor(sizes, device=membership.device))
        if bucket is not None:
            # frombuffer warns of memory that cannot be written, such as that of bytes.
            membership.broadcast(
                torch.frombuffer(bytearray(text), dtype=torch.uint8).to(membership.device)
            )
            membership.broadcast(bucket)

    def _copied(self, bucket: Tensor) -> Tensor:
        """The bucket, if it is in the host's memory, or a copy there, under way until the next one
        is asked for.
        """
        import torch

        if bucket.device.type == "cpu":
            return bucket
        copying = self._copying = self._copying or torch.cuda.Stream()
        copying.synchronize()  # so that two buckets are on the GPU at most
        # The bucket is filled on the current stream, and the copy must not begin before that.
        copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copying):
            copy = torch.empty_like(bucket, device="cpu", pin_memory=True).copy_(
                bucket, non_blocking=True
            )
        # Otherwise PyTorch hands its memory to the next bucket as soon as Python drops this one.
        bucket.record_stream(copying)
        return copy


class BroadcastReceiver(Receiver[Arrays | BroadcastGroup]):
    """Receives a broadcast, in a process of the engine or in the rollout actor, or reads the object
    store's arrays.
    """

    def __init__(self, settings: BroadcastTransport) -> None:
        from rayloop.transports.process_group import Membership

        self._settings = settings
        self._membership = Membership(settings.backend, settings.timeout)
        self._records: dict[str, TensorRecord] = {}

    async def take(
        self, engine: GenerationEngine, manifest: Manifest, source: Arrays | BroadcastGroup
    ) -> None:
        """As any receiver, unless the engine's own processes are the members of the group.

        Raises BroadcastFailed, too.
        """
        if not isinstance(source, BroadcastGroup):
            return await super().take(engine, manifest, source)
        if self._settings.workers:
            async with paused(engine):
                return await cast(StreamingEngine, engine).receive(
                    manifest.version, pickle.dumps((self._settings, source))
                )
        tensors = await asyncio.to_thread(self.unpack, manifest, source)
        async with paused(engine):
            await engine.load(Manifest(manifest.version, self._records), tensors)

    def unpack(self, manifest: Manifest, source: Arrays | BroadcastGroup) -> Mapping[str, Tensor]:
        """The verified CPU tensors. Raises WeightSyncError, BroadcastFailed."""
        if isinstance(source, BroadcastGroup):
            return {name: tensor.cpu() for name, tensor in self.stream(manifest.version, source)}
        return ArrayReceiver().unpack(manifest, source)

    def stream(self, version: Version, meeting: BroadcastGroup) -> Iterator[tuple[str, Tensor]]:
        """Yields the verified tensors on the group's device as they come, but nothing after a
        bucket with a damaged one; must be exhausted. Raises BroadcastFailed, and WeightSyncError at
        the end.
        """
        from rayloop.transports.manifest import complain, damage

        faults, self._records = list[str](), {}
        try:
            self._membership.join(meeting.host, meeting.port, meeting.name, meeting.size)
            while (got := self._receive_bucket()) is not None:
                records, bucket = got
                self._records |= records
                tensors = views(bucket, records)
                faults += damage(records, tensors)
                # A damaged tensor must not reach the engine, but
                # its sender goes on, so the rest is received.
                if not faults:
                    yield from tensors.items()
        except RuntimeError as error:
            self._membership.leave()
            raise BroadcastFailed(
                f"version {version}: could not receive the broadcast: {error}"
            ) from error
        # The error comes at the end: one in the loop would leave the other members waiting.
        complain(version, faults)

    def _receive_bucket(self) -> tuple[dict[str, TensorRecord], Tensor] | None:
        """Returns what ``BroadcastSender._send_bucket`` sent, None at the end."""
        import torch

        def received(size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            buffer = torch.empty(size, dtype=dtype, device=self._membership.device)
            self._membership.broadcast(buffer)
            return buffer

        sizes = received(2, torch.int64).tolist()
        if not sizes[0]:
            return None
        described = json.loads(received(sizes[0]).cpu().numpy().tobytes())
        records = {
            name: TensorRecord(tuple(shape), *rest) for name, (shape, *rest) in described.items()
        }
        return records, received(sizes[1])
