"""Publication by broadcast: a process group of the policy's first rank and all rollout actors, apart from the trainer's own.

The manifest carries names, shapes and checksums; the group carries bytes only, in buckets whose layout both sides derive from
the manifest. A group lives as long as its members: any failure ends it at once for whoever notices, whose closed connections
tell the others, and no wait is longer than the settings' timeout.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from rayloop.core.failures import BroadcastFailed
from rayloop.core.protocols import BroadcastGroup, Manifest
from rayloop.transports.manifest import DTYPES, verify
from rayloop.transports.object_store import ObjectStore
from rayloop.transports.settings import CollectiveTransport

ALIGNMENT = 16
"""Bytes; tensors of any dtype start at a multiple of it within a bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """``offsets`` [name] in bytes within ``size`` bytes."""

    size: int
    offsets: Mapping[str, int]


def buckets(manifest: Manifest, limit: int) -> Iterator[Bucket]:
    """Cut the manifest's tensors, in order, into buckets of at most ``limit`` bytes; a larger tensor is alone."""
    size, offsets = 0, dict[str, int]()
    for name, tensor in manifest.tensors.items():
        room = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if offsets and size + room > limit:
            yield Bucket(size, offsets)
            size, offsets = 0, {}
        offsets[name] = size
        size += room
    if offsets:
        yield Bucket(size, offsets)


class Collective(ObjectStore):
    """The object store, and beside it the broadcast, whose source is a ``BroadcastGroup``.

    ``invite`` and ``send`` are for the policy's first rank, ``unpack`` is for the rollout actors.
    """

    def __init__(self, settings: CollectiveTransport) -> None:
        self._settings = settings
        self._timeout = timedelta(seconds=settings.timeout)
        self._device = torch.device("cuda" if settings.backend == "nccl" else "cpu")
        self._server: dist.TCPStore | None = None
        self._invited: tuple[tuple[int, ...], int] | None = None
        self._meeting: BroadcastGroup | None = None
        self._group: dist.Backend | None = None

    def invite(self, host: str, receivers: tuple[int, ...], failures: int) -> BroadcastGroup:
        """A meeting with these receivers, who reach this process at ``host``.

        It is the last one, whose group exists, as long as neither they nor the number of failed broadcasts have changed.
        """
        if self._server is None:
            self._server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        if self._meeting is None or self._invited != (receivers, failures):
            self._leave()
            self._invited = (receivers, failures)
            self._meeting = BroadcastGroup(host, self._server.port, secrets.token_hex(8), 1 + len(receivers))
        return self._meeting

    def send(self, manifest: Manifest, source: Mapping[str, npt.NDArray[np.uint8]], meeting: BroadcastGroup) -> None:
        """Broadcast what ``pack`` made. Raises BroadcastFailed."""
        try:
            group = self._join(meeting, first=True)
            for bucket in buckets(manifest, self._settings.bucket_bytes):
                buffer = torch.zeros(bucket.size, dtype=torch.uint8)
                for name, offset in bucket.offsets.items():
                    buffer[offset : offset + source[name].nbytes] = torch.from_numpy(source[name])
                self._broadcast(group, buffer.to(self._device))
        except RuntimeError as error:
            raise self._failed(manifest, "send", error) from error

    def unpack(
        self, manifest: Manifest, source: BroadcastGroup | Mapping[str, npt.NDArray[np.uint8]]
    ) -> Mapping[str, Tensor]:
        """Receive from the meeting, or read the object store's arrays. Raises PublicationError, BroadcastFailed."""
        if not isinstance(source, BroadcastGroup):
            return super().unpack(manifest, source)
        tensors = {}
        try:
            group = self._join(source, first=False)
            for bucket in buckets(manifest, self._settings.bucket_bytes):
                buffer = torch.empty(bucket.size, dtype=torch.uint8, device=self._device)
                self._broadcast(group, buffer)
                received = buffer.cpu()
                for name, offset in bucket.offsets.items():
                    expected = manifest.tensors[name]
                    piece = received[offset : offset + expected.nbytes]
                    tensors[name] = piece.view(DTYPES[expected.dtype]).view(expected.shape)
        except RuntimeError as error:
            raise self._failed(manifest, "receive", error) from error
        verify(manifest, tensors)
        return tensors

    def _join(self, meeting: BroadcastGroup, *, first: bool) -> Any:
        """The meeting's process group, formed at the first time. Raises RuntimeError when the members do not come."""
        if self._group is not None and meeting == self._meeting:
            return self._group
        if not first:
            self._leave()
        server = self._server or dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=self._timeout)
        store = dist.PrefixStore(meeting.name, server)
        rank = 0 if first else store.add("joined", 1)
        if rank >= meeting.size:
            raise RuntimeError(f"{rank} receivers came to a meeting of {meeting.size - 1}")
        form = dist.ProcessGroupNCCL if self._settings.backend == "nccl" else dist.ProcessGroupGloo
        self._group, self._meeting = form(store, rank, meeting.size, self._timeout), meeting
        return self._group

    def _broadcast(self, group: Any, buffer: Tensor) -> None:
        group.broadcast(buffer, 0).wait(self._timeout)

    def _failed(self, manifest: Manifest, what: str, error: RuntimeError) -> BroadcastFailed:
        self._leave()
        return BroadcastFailed(f"version {manifest.version}: could not {what} the broadcast: {error}")

    def _leave(self) -> None:
        """Close the connections to the other members."""
        self._group = self._meeting = None
