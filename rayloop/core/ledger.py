"""The ledger: one state per live trajectory id and a counter per final state.

It accounts for every trajectory.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

from rayloop.core.failures import LedgerError
from rayloop.core.groups import Status, TrajectoryState
from rayloop.core.types import TrajectoryId

LIVE = (TrajectoryState.IN_FLIGHT, TrajectoryState.READY)


class LedgerState(TypedDict):
    """A ledger as plain values, for the checkpoint. ``live`` rows are (group, sample, state)."""

    issued: int
    attempts: int
    replayed: int
    highest: tuple[int, int] | None
    live: list[tuple[int, int, str]]
    reissuable: list[tuple[int, int]]
    final: dict[str, int]


class Ledger:
    """Counts the ways ``in_flight -> ready -> final``.

    An illegal step raises LedgerError and changes nothing.
    """

    def __init__(self) -> None:
        self._issued = self._attempts = 0
        self._replayed = 0
        self._highest: TrajectoryId | None = None
        self._live: dict[TrajectoryId, TrajectoryState] = {}
        self._reissuable: set[TrajectoryId] = set()
        self._final: Counter[str] = Counter()

    def may_issue(self, ids: Iterable[TrajectoryId]) -> bool:
        """Whether ``issue`` would take these ids: each is new, or may be issued again."""
        return all(
            id in self._reissuable or self._highest is None or id > self._highest for id in ids
        )

    def issue(self, ids: Iterable[TrajectoryId]) -> None:
        """Put new ids in flight.

        Raises LedgerError for an id that was issued before, unless it may be re-issued.
        """
        new = sorted(ids)
        highest = self._highest
        for id in new:
            if id in self._reissuable:
                continue
            if highest is not None and id <= highest:
                raise LedgerError(
                    f"trajectory {id} was issued before (ids grow, the highest so far is {highest})"
                )
            highest = id
        if len(set(new)) != len(new):
            raise LedgerError(f"the same id is issued twice: {', '.join(map(str, new))}")
        self._highest = highest
        self._reissuable.difference_update(new)
        self._live.update((id, TrajectoryState.IN_FLIGHT) for id in new)
        self._issued += len(new)

    def move(self, id: TrajectoryId, status: Status) -> None:
        """Take a live id to ``ready`` or to a final state.

        Raises LedgerError when that step does not exist.
        """
        now = self._live.get(id)
        if now is None:
            raise LedgerError(
                f"trajectory {id} cannot become {_key(status)}: it is not live (never issued, or"
                " final)"
            )
        if status.state == TrajectoryState.READY and now == TrajectoryState.IN_FLIGHT:
            self._live[id] = TrajectoryState.READY
        elif status.state not in LIVE:
            del self._live[id]
            self._final[_key(status)] += 1
        else:
            raise LedgerError(f"trajectory {id} cannot go from {now} to {status.state}")

    def state_of(self, id: TrajectoryId) -> TrajectoryState | None:
        """The state of a live id; None when it was never issued or is final."""
        return self._live.get(id)

    def replay(self) -> None:
        """Count a stored trajectory that was injected into a group; it has no state here."""
        self._replayed += 1

    def reissue_live(self) -> tuple[TrajectoryId, ...]:
        """Forget the ids in flight after a restore, and return them.

        ``issue`` accepts them again.
        """
        forgotten = [id for id, state in self._live.items() if state == TrajectoryState.IN_FLIGHT]
        for id in forgotten:
            del self._live[id]
        self._reissuable.update(forgotten)
        self._issued -= len(forgotten)
        self._attempts += len(forgotten)
        return tuple(sorted(forgotten))

    def counts(self) -> dict[str, int]:
        """The counts by state (``filtered[all_wrong]``).

        ``attempts`` and ``replayed`` are not part of the balance.
        """
        live = Counter(self._live.values())
        counts = {
            "issued": self._issued,
            **{str(state): live[state] for state in LIVE},
            str(TrajectoryState.TRAINED): 0,
        }
        counts |= dict(sorted(self._final.items()))
        return counts | {"attempts": self._attempts, "replayed": self._replayed}

    def check(self) -> None:
        """Raises LedgerError with the counts unless issued = live + final."""
        live = len(self._live)
        final = sum(self._final.values())
        if self._issued != live + final:
            raise LedgerError(
                f"{self._issued} trajectories issued, {live} live and {final} final:"
                f" {self.counts()}"
            )

    def state(self) -> LedgerState:
        """Everything, as plain values (JSON or pickle)."""
        return LedgerState(
            issued=self._issued,
            attempts=self._attempts,
            replayed=self._replayed,
            highest=None if self._highest is None else (self._highest.group, self._highest.sample),
            live=[(id.group, id.sample, str(state)) for id, state in sorted(self._live.items())],
            reissuable=[(id.group, id.sample) for id in sorted(self._reissuable)],
            final=dict(self._final),
        )

    def restore(self, state: LedgerState) -> None:
        """Become the ledger that ``state`` was taken from.

        Raises LedgerError when that one does not balance.
        """
        self._issued = state["issued"]
        self._attempts = state["attempts"]
        self._replayed = state["replayed"]
        self._highest = None if state["highest"] is None else TrajectoryId(*state["highest"])
        self._live = {
            TrajectoryId(group, sample): TrajectoryState(name)
            for group, sample, name in state["live"]
        }
        self._reissuable = {TrajectoryId(*row) for row in state["reissuable"]}
        self._final = Counter(state["final"])
        self.check()


def _key(status: Status) -> str:
    return f"{status.state}[{status.reason}]" if status.reason else str(status.state)
