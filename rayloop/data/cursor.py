"""The order in which a run visits the tasks of its dataset, and which of them stand for all."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256

from rayloop.core.failures import CheckpointError
from rayloop.core.types import Task, derive


def evenly(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """``limit`` of the tasks (None: all), in their order: as many of each data source where
    possible, evenly spread.
    """
    if limit is None or limit >= len(tasks):
        return list(tasks)
    sources: dict[str, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        sources[task.source].append(index)
    chosen, left = list[int](), limit
    ascending = sorted(sources.values(), key=len)
    for position, rows in enumerate(ascending):  # what a small source lacks, the larger ones get
        share = min(len(rows), left // (len(ascending) - position))
        chosen += [rows[n * len(rows) // share] for n in range(share)]
        left -= share
    return [tasks[index] for index in sorted(chosen)]


class TaskCursor:
    """The next task: each epoch is a permutation from seed and epoch; with ``tiers`` [count] the
    first visits the lowest first.
    """

    def __init__(
        self, count: int, seed: int, shuffle: bool = True, tiers: Sequence[int] = ()
    ) -> None:
        if count < 1:
            raise ValueError(f"a cursor needs at least one task, not {count}")
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._tiers = tuple(tiers)
        self._begin(0, 0)

    def next(self) -> int:
        """The index of the next task; begins another epoch when all have been visited."""
        if self._position == self._count:
            self._begin(self._epoch + 1, 0)
        self._position += 1
        return self._order[self._position - 1]

    def visits(self, index: int) -> int:
        """How often ``next`` has returned ``index``."""
        return self._epoch + (self._rank[index] < self._position)

    def state(self) -> dict[str, int | bool | str]:
        """Plain values for a checkpoint."""
        return {
            "count": self._count,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "order": sha256(repr(self._tiers).encode()).hexdigest()[:16] if self._tiers else "",
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: Mapping[str, int | bool | str]) -> None:
        """Continue where ``state`` was taken.

        Raises CheckpointError when data, seed, shuffling or tiers have changed.
        """
        state = {"order": "", **state}  # older checkpoints have none
        here = self.state()
        fixed = [
            name for name in ("count", "seed", "shuffle", "order") if state[name] != here[name]
        ]
        changed = [f"{name}: {state[name]} then, {here[name]} now" for name in fixed]
        if changed:
            raise CheckpointError(
                f"the checkpoint visits other tasks than this run ({'; '.join(changed)})"
            )
        self._begin(int(state["epoch"]), int(state["position"]))

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = list(range(self._count))
        if self._shuffle:
            random.Random(derive(self._seed, "epoch", epoch)).shuffle(self._order)
        if self._tiers and epoch == 0:
            # The sort is stable: within a tier the shuffled order stays.
            self._order.sort(key=self._tiers.__getitem__)
        self._rank = {index: rank for rank, index in enumerate(self._order)}
