"""One way to derive seeds: every random choice of a run follows from its seed and what the choice is for."""

from __future__ import annotations

import hashlib

SEED_BITS = 63


def derive(seed: int | str, *parts: int | str) -> int:
    """A seed in [0, 2**63) for the purpose named by ``parts``: the same on every machine and in every process.

    The parts' types and boundaries count: ``derive(0, "a", "b")``, ``derive(0, "ab")`` and ``derive(0, 1)``,
    ``derive(0, "1")`` all differ.
    """
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
