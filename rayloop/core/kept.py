"""The tokens that top_p and top_k keep. No torch, no ray, no I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

MOST_KEPT = 128
"""Tokens that ``top_p`` keeps at most, and the highest ``top_k``: it bounds what travels with a
sampled token.
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens that ``top_p`` and ``top_k`` kept where each of N tokens was sampled, as bytes of
    int32: their ``ids``, one position after the other, and the ``counts`` [N] of each. The
    trainer's log-probs are over them (arXiv:2512.02556).
    """

    ids: bytes
    counts: bytes

    @classmethod
    def of(cls, positions: Sequence[npt.ArrayLike]) -> Self:
        """From the token ids of each position. Raises ValueError for a position without any."""
        rows = [np.asarray(row, np.int32) for row in positions]
        if not all(map(len, rows)):
            raise ValueError("no token was kept at a position where one was sampled")
        return cls(
            b"".join(row.tobytes() for row in rows),
            np.array([len(row) for row in rows], np.int32).tobytes(),
        )

    @classmethod
    def everything(cls, n: int) -> Self:
        """Of ``n`` positions where nothing was removed: the id -1 stands for all tokens."""
        return cls.of([[-1]] * n)

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The positions of all parts, in order."""
        parts = list(parts)
        return cls(b"".join(part.ids for part in parts), b"".join(part.counts for part in parts))

    def padded(self) -> npt.NDArray[np.int32]:
        """[N, most ids of a position]; a shorter row repeats its last id."""
        ids, counts = np.frombuffer(self.ids, np.int32), np.frombuffer(self.counts, np.int32)
        # A repeated id changes nothing where the rows are read as sets.
        columns = np.minimum(np.arange(counts.max(initial=0)), counts[:, None] - 1)
        return ids[(counts.cumsum() - counts)[:, None] + columns]
