"""Weights by broadcast from the policy's first rank, bucket by bucket as they are gathered.

They go to the processes of vLLM or SGLang, or, for other engines, to the rollout actors. When a
broadcast fails, they go through the object store.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
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


ALIGNMENT_BYTES = 16
"""Bytes; tensors of any dtype start at a multiple of it within a bucket."""


def _aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def buckets(
    weights: Iterable[tuple[str, Tensor]], limit: int, device: torch.device
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Copy tensors, as they come, into buckets of at most ``limit`` bytes on ``device``.

    A tensor that is larger has a separate bucket. Yields the bytes of each bucket, and its tensors
    [name] as views of them.
    """
    import torch

    tensors: dict[str, Tensor] = {}
    bucket = torch.empty(0)
    used = 0
    for name, tensor in weights:
        size = _aligned(tensor.nbytes)
        if tensors and used + size > limit:
            yield bucket[:used], tensors
            tensors = {}
        if not tensors:
            used = 0
            # Pinned memory lets the copy from a GPU run asynchronously.
            from_gpu_to_cpu = device.type == "cpu" and tensor.device.type != "cpu"
            # Each bucket has separate memory: on a CPU the object store's copy is the bucket
            # itself.
            bucket = torch.empty(
                max(size, limit),
                dtype=torch.uint8,
                device=device,
                pin_memory=from_gpu_to_cpu,
            )
        view = bucket[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensors[name] = view.copy_(tensor)
        used += size
    if tensors:
        yield bucket[:used], tensors


def views(bucket: Tensor, records: Mapping[str, TensorRecord]) -> dict[str, Tensor]:
    """The tensors [name] of a bucket, in its memory."""
    from rayloop.transports.manifest import DTYPES

    tensors: dict[str, Tensor] = {}
    start = 0
    for name, record in records.items():
        content = bucket[start : start + record.nbytes]
        tensors[name] = content.view(DTYPES[record.dtype]).view(record.shape)
        start += _aligned(record.nbytes)
    return tensors


@dataclass(frozen=True)
class BroadcastGroup:
    """The address of a process group.

    Its ``size`` members meet at ``host:port``, by the ``name``, which only they know. They wait
    for each other ``timeout`` seconds at most, for the meeting and for each bucket.
    """

    host: str
    port: int
    name: str = field(repr=False)
    size: int
    timeout: float


class Collective(WeightTransport[Arrays | BroadcastGroup]):
    """A transport by broadcast, with a copy in the object store.

    The copy is made during the broadcast, and reaches the store after the engines have resumed.
    Engines that start later load it, and all engines do when a broadcast fails.
    """

    def __init__(self, settings: BroadcastTransport, folder: str) -> None:
        super().__init__(settings, folder)
        self._failures = 0
        self._copy: asyncio.Task[WeightUpdate[Any]] | None = None

    def sender(self, host: str) -> BroadcastSender:
        """The rank's part; it opens the store at ``host``."""
        return BroadcastSender(self.settings, host)

    def receiver(self) -> BroadcastReceiver:
        """The part of the rollout actor, and of each process of its engine."""
        return BroadcastReceiver(self.settings)

    async def deliver(self, policy: WeightExporter, rollouts: Rollouts, version: Version) -> None:
        """Broadcast to the engines in service; fall back to the object store.

        The process group is new if the engines have changed or the last broadcast failed. Raises
        PolicyLost, WeightSyncError for damaged weights, and the error of the last copy.
        """
        # The last copy must end before its arrays are replaced. Its failure is raised, unless the
        # policy was lost, which the next call notices itself.
        if self._copy is not None:
            await asyncio.wait({self._copy})
            with suppress(PolicyLost, asyncio.CancelledError):
                self._copy.result()
        # Members that nobody answers give up before they are replaced.
        timeout = min(rollouts.patience / 2, self.settings.timeout)
        meeting = await policy.invite(rollouts.members, self._failures, timeout)
        sending = asyncio.ensure_future(policy.send(version, meeting))
        # It exports once the sending has ended: the sender then has the copy, also of a failed
        # broadcast.
        self._copy = asyncio.create_task(_export_after(sending, policy, version))
        # This comes before the first load: an engine that starts during the load was not invited,
        # and takes the copy.
        rollouts.keep(WeightUpdate(Manifest(version, {}), self._copy))
        receiving = rollouts.load(WeightUpdate(Manifest(version, {}), meeting))
        try:
            # Both are awaited, and the sender's error comes first: a lost policy fails the
            # receivers as well.
            for result in await asyncio.gather(sending, receiving, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BroadcastFailed as error:
            self._failures += 1
            rollouts.fell_back(version, error)
            # shield: a cancelled delivery must leave the copy to the engines that wait for it.
            copy = await asyncio.shield(self._copy)
            rollouts.keep(copy)
            await rollouts.load(copy)


async def _export_after(
    sending: asyncio.Future[Any], policy: WeightExporter, version: Version
) -> WeightUpdate[Any]:
    """The copy of the weights, after their broadcast has ended or failed."""
    with suppress(BroadcastFailed):
        await asyncio.shield(sending)
    return await policy.export(version)


class BroadcastSender(Sender[Arrays | BroadcastGroup]):
    """A sender that broadcasts weights as they are gathered.

    It keeps a copy in the host's memory for the object store.
    """

    def __init__(self, settings: BroadcastTransport, host: str) -> None:
        from rayloop.transports.process_group import Membership

        self._settings = settings
        self._host = host
        self._membership = Membership(settings.backend)
        self._meeting: BroadcastGroup | None = None
        self._invited: tuple[tuple[int, ...], int] | None = None
        self._copy_stream: torch.cuda.Stream | None = None
        self._sent: WeightUpdate[Arrays | BroadcastGroup] | None = None

    def serialize(
        self, version: Version, tensors: Mapping[str, Tensor]
    ) -> WeightUpdate[Arrays | BroadcastGroup]:
        """Same as ``ArraySender.serialize``."""
        update = ArraySender().serialize(version, tensors)
        return WeightUpdate(update.manifest, update.source)

    def invite(self, engines: tuple[int, ...], failures: int, timeout: float) -> BroadcastGroup:
        """Return the group for this rank and the engines with these serial numbers.

        It is the existing group unless the engines or the number of failed broadcasts have changed.
        Its members wait ``timeout`` seconds. Members of a new group wait ``settings.timeout``: they
        have yet to meet and to connect.
        """
        if self._meeting is None or self._invited != (engines, failures):
            self._invited = (engines, failures)
            size = 1 + len(engines) * max(1, self._settings.workers)
            timeout = self._settings.timeout
            port = self._membership.serve(self._host, timeout)
            # Each group has a random name: a late member of an earlier one cannot join this one.
            self._meeting = BroadcastGroup(self._host, port, secrets.token_hex(16), size, timeout)
        return replace(self._meeting, timeout=timeout)

    def send(
        self, version: Version, weights: Iterable[tuple[str, Tensor]], meeting: BroadcastGroup
    ) -> None:
        """Broadcast the weights to the group.

        When that fails they are copied all the same. Raises BroadcastFailed, and the errors of
        ``weights``.
        """
        from rayloop.transports.manifest import manifest, raw

        membership = self._membership
        records: dict[str, TensorRecord] = {}
        arrays: dict[str, Any] = {}
        failures: list[RuntimeError] = []

        # Weights must be gathered to their end on all ranks, so a failed broadcast only stops the
        # sending.
        def attempt(step: Callable[..., None], *arguments: Any) -> None:
            try:
                if not failures:
                    step(*arguments)
            except RuntimeError as error:
                failures.append(error)
                self._leave()

        try:
            attempt(membership.join, *astuple(meeting))
            for bucket, tensors in buckets(weights, self._settings.bucket_bytes, membership.device):
                bucket_records = manifest(version, tensors).tensors
                copy = self._host_copy(bucket)
                attempt(self._send_bucket, bucket_records, bucket)
                records |= bucket_records
                copied_tensors = views(copy, bucket_records)
                arrays |= {name: raw(tensor) for name, tensor in copied_tensors.items()}
            attempt(self._send_bucket)
        except BaseException:
            # The receivers then fail at once and need not wait.
            self._leave()
            raise
        if self._copy_stream is not None:
            self._copy_stream.synchronize()
        self._sent = WeightUpdate(Manifest(version, records), arrays)
        if failures:
            raise BroadcastFailed(
                f"version {version}: could not send the broadcast: {failures[0]}"
            ) from failures[0]

    def sent(self) -> WeightUpdate[Arrays | BroadcastGroup]:
        """Return the copy of the weights that were sent last, once."""
        update = self._sent
        assert update is not None
        self._sent = None
        return update

    def _leave(self) -> None:
        self._membership.leave()
        self._meeting = None

    def _send_bucket(
        self, records: Mapping[str, TensorRecord] | None = None, bucket: Tensor | None = None
    ) -> None:
        """Broadcast the sizes of a description and of a bucket, then both.

        Two zeros end the weights.
        """
        import torch

        membership = self._membership
        description = b""
        if records:
            fields = {name: astuple(record) for name, record in records.items()}
            description = json.dumps(fields).encode()
        sizes = [len(description), 0 if bucket is None else bucket.nbytes]
        membership.broadcast(torch.tensor(sizes, device=membership.device))
        if bucket is not None:
            # frombuffer warns of memory that cannot be written, such as that of bytes.
            buffer = torch.frombuffer(bytearray(description), dtype=torch.uint8)
            membership.broadcast(buffer.to(membership.device))
            membership.broadcast(bucket)

    def _host_copy(self, bucket: Tensor) -> Tensor:
        """The bucket, if it is in the host's memory, or a copy there.

        The copy may be incomplete until the next call.
        """
        import torch

        if bucket.device.type == "cpu":
            return bucket
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()
        stream = self._copy_stream
        # At most two buckets are then on the GPU.
        stream.synchronize()
        # The bucket is filled on the current stream, and the copy must not begin before that.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copy = torch.empty_like(bucket, device="cpu", pin_memory=True)
            copy.copy_(bucket, non_blocking=True)
        # Otherwise PyTorch gives its memory to the next bucket as soon as Python drops this one.
        bucket.record_stream(stream)
        return copy


class BroadcastReceiver(Receiver[Arrays | BroadcastGroup]):
    """A receiver of broadcasts, in a process of the engine or in the rollout actor.

    It also reads the object store's arrays.
    """

    def __init__(self, settings: BroadcastTransport) -> None:
        from rayloop.transports.process_group import Membership

        self._settings = settings
        self._membership = Membership(settings.backend)
        self._records: dict[str, TensorRecord] = {}

    async def take(
        self, engine: GenerationEngine, manifest: Manifest, source: Arrays | BroadcastGroup
    ) -> None:
        """Load the weights into the engine.

        If its own processes are the members of the group, they receive the weights. Raises
        WeightSyncError, BroadcastFailed.
        """
        if not isinstance(source, BroadcastGroup):
            return await super().take(engine, manifest, source)
        if self._settings.workers:
            streaming_engine = cast(StreamingEngine, engine)
            invitation = pickle.dumps((self._settings, source))
            async with paused(engine):
                return await streaming_engine.receive(manifest.version, invitation)
        tensors = await asyncio.to_thread(self.deserialize, manifest, source)
        async with paused(engine):
            await engine.load(Manifest(manifest.version, self._records), tensors)

    def deserialize(
        self, manifest: Manifest, source: Arrays | BroadcastGroup
    ) -> Mapping[str, Tensor]:
        """The verified CPU tensors. Raises WeightSyncError, BroadcastFailed."""
        if isinstance(source, BroadcastGroup):
            return {name: tensor.cpu() for name, tensor in self.stream(manifest.version, source)}
        return ArrayReceiver().deserialize(manifest, source)

    def stream(self, version: Version, meeting: BroadcastGroup) -> Iterator[tuple[str, Tensor]]:
        """Yield the verified tensors on the group's device as they come.

        After a bucket with a damaged tensor it yields nothing more. It must be exhausted. Raises
        BroadcastFailed, and WeightSyncError at the end.
        """
        from rayloop.transports.manifest import complain, damage

        faults: list[str] = []
        self._records = {}
        try:
            self._membership.join(*astuple(meeting))
            while True:
                message = self._receive_bucket()
                if message is None:
                    break
                records, bucket = message
                self._records |= records
                tensors = views(bucket, records)
                faults += damage(records, tensors)
                # A damaged tensor must not reach the engine, but its sender continues, so the rest
                # is received.
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
        """Return the records and the bucket that ``_send_bucket`` sent, None at the end."""
        import torch

        sizes = self._receive(2, torch.int64).tolist()
        description_size, bucket_size = sizes
        if not description_size:
            return None
        description = self._receive(description_size, torch.uint8).cpu().numpy().tobytes()
        records = {}
        for name, (shape, *fields) in json.loads(description).items():
            records[name] = TensorRecord(tuple(shape), *fields)
        return records, self._receive(bucket_size, torch.uint8)

    def _receive(self, size: int, dtype: torch.dtype) -> Tensor:
        import torch

        buffer = torch.empty(size, dtype=dtype, device=self._membership.device)
        self._membership.broadcast(buffer)
        return buffer
