"""Buckets of tensors that are sent together. Sender and receiver compute the same layout from the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rayloop.core.protocols import Manifest

ALIGNMENT = 16
"""Bytes; tensors of any dtype start at a multiple of it within a bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """``offsets`` [name]: where each tensor begins, in bytes, within ``size`` bytes."""

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
