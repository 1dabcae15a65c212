"""How the time of a call grows with the length of its text."""

import time
from collections.abc import Callable

TRIES = 20


def times(work: Callable[[], object]) -> float:
    """Processor seconds of this thread: other threads and programs do not count."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def grows_with_length(
    work: Callable[[str], object], text: Callable[[int], str], length: int
) -> bool:
    """Whether four times the text takes less than nine times as long; what grows with the square
    takes sixteen times as long.

    Other work on the machine slows either side down at random and never speeds it up, so the least
    of some tries is compared, and both sides are tried in turn until they agree with the claim,
    ``TRIES`` times at most.
    """
    short, long = text(length), text(4 * length)
    least = [float("inf"), float("inf")]
    for _ in range(TRIES):
        least = [
            min(least[0], times(lambda: work(short))),
            min(least[1], times(lambda: work(long))),
        ]
        if least[1] < 9 * least[0]:
            return True
    return False
