"""The tokens that top_p and top_k keep. No torch, no ray, no I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

MAX_TOP_K = 128
"""The highest ``top_k``, and the most tokens that ``top_p`` keeps.

It bounds the data that is sent with a sampled token.
"""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that ``top_p`` and ``top_k`` kept where each of N tokens was sampled.

    As bytes of int32: their ``ids``, one position after the other, and the ``counts`` [N] of each.
    The trainer's log-probs are over them (arXiv:2512.02556).
    """

    ids: bytes
    counts: bytes

    @classmethod
    def of(cls, positions: Sequence[npt.ArrayLike]) -> Self:
        """Build it from the token ids of each position. Raises ValueError for an empty one."""
        rows = [np.asarray(row, np.int32) for row in positions]
        if not all(map(len, rows)):
            raise ValueError("no token was kept at a position where one was sampled")
        counts = np.array([len(row) for row in rows], np.int32)
        return cls(b"".join(row.tobytes() for row in rows), counts.tobytes())

    @classmethod
    def everything(cls, n: int) -> Self:
        """``n`` positions where nothing was removed: the id -1 stands for all tokens."""
        return cls.of([[-1]] * n)

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """The positions of all parts, in order."""
        parts = list(parts)
        return cls(b"".join(part.ids for part in parts), b"".join(part.counts for part in parts))

    def padded(self) -> npt.NDArray[np.int32]:
        """[N, most ids of a position]; a shorter row repeats its last id."""
        ids = np.frombuffer(self.ids, np.int32)
        counts = np.frombuffer(self.counts, np.int32)
        # A repeated id changes nothing where the rows are read as sets.
        columns = np.minimum(np.arange(counts.max(initial=0)), counts[:, None] - 1)
        starts = counts.cumsum() - counts
        return ids[starts[:, None] + columns]
