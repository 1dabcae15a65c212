"""What host and interpreter say to each other, in the hands of a sender who means harm."""

from __future__ import annotations

import json
import struct
import tracemalloc

from rayloop.sandbox import frames


class Dripping:
    """A connection on which never more than two bytes are there."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def recv(self, size: int) -> bytes:
        self.at += min(size, 2)
        return self.content[self.at - min(size, 2) : self.at]


def test_an_answer_takes_no_more_memory_when_it_comes_in_small_parts() -> None:
    size = 1 << 18
    header = json.dumps({"blobs": [size]}).encode()
    connection = Dripping(struct.pack(">I", len(header)) + header + bytes(size))
    tracemalloc.start()
    try:
        _, (blob,) = frames.receive(connection, None, frames.MOST_ANSWERED)  # type: ignore[arg-type]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert blob == bytes(size)
    assert most < 3 * size
