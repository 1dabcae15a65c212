"""The order in which a run visits the tasks of its dataset, and a subset that represents them."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import sha256

from rayloop.core.failures import CheckpointError
from rayloop.core.types import Task, derive


def evenly(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """``limit`` of the tasks (None: all) in their order, evenly spread over the dataset.

    Each data source has the same number of tasks where possible.
    """
    if limit is None or limit >= len(tasks):
        return list(tasks)
    sources: dict[str, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        sources[task.source].append(index)
    selection: list[int] = []
    remaining = limit
    # Small sources come first, so that the larger ones get the tasks that a small one lacks.
    ascending = sorted(sources.values(), key=len)
    for position, rows in enumerate(ascending):
        share = min(len(rows), remaining // (len(ascending) - position))
        selection += [rows[n * len(rows) // share] for n in range(share)]
        remaining -= share
    return [tasks[index] for index in sorted(selection)]


class TaskCursor:
    """Yields the next task: each epoch is a permutation that seed and epoch determine.

    With ``tiers`` [count] the first epoch visits the lowest tier first.
    """

    def __init__(
        self, count: int, seed: int, shuffle: bool = True, tiers: Sequence[int] = ()
    ) -> None:
        if count < 1:
            raise ValueError(f"a cursor needs at least one task, not {count}")
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
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
        state = {"order": "", **state}  # older checkpoints have no order
        current = self.state()
        differences = [
            f"{name}: {state[name]} then, {current[name]} now"
            for name in ("count", "seed", "shuffle", "order")
            if state[name] != current[name]
        ]
        if differences:
            raise CheckpointError(
                f"the checkpoint visits other tasks than this run ({'; '.join(differences)})"
            )
        self._begin(int(state["epoch"]), int(state["position"]))

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = list(range(self._count))
        if self._shuffle:
            random.Random(derive(self._seed, "epoch", epoch)).shuffle(self._order)
        if self._tiers and epoch == 0:
            # The sort is stable: within a tier the shuffled order stays.
            self._order.sort(key=self._tiers.__getitem__)
        self._rank = {index: rank for rank, index in enumerate(self._order)}
