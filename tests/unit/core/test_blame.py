"""Who broke an episode: what foreign code raises on what the policy wrote, and what is never the
policy's.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from rayloop.core.failures import (
    Blame,
    DataFailure,
    InfrastructureFailure,
    PolicyFailure,
    Raised,
    ToolDeadline,
    blame,
    blame_of,
    carrying_out,
)


class ConnectError(Exception):
    """As a client of HTTP raises, from what the system said."""


def from_a_connection() -> None:
    try:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    except OSError as error:
        raise ConnectError("all attempts failed") from error


def while_handling_a_full_disk() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        int("")


def hidden() -> None:
    try:
        raise ConnectionResetError
    except OSError:
        raise ValueError("no such page") from None


def grouped() -> None:
    raise ExceptionGroup("several", [TimeoutError("late"), ValueError("bad")])


def raising(error: Exception) -> Callable[[], None]:
    def made() -> None:
        raise error

    return made


@pytest.mark.parametrize(
    ("work", "who"),
    [
        (raising(ValueError("x")), Blame.POLICY),
        (raising(TypeError("x")), Blame.POLICY),
        (raising(RecursionError("x")), Blame.POLICY),
        (raising(FileNotFoundError(errno.ENOENT, "x")), Blame.POLICY),
        (raising(OSError(errno.ENAMETOOLONG, "x")), Blame.POLICY),
        (raising(OSError("cannot identify image file")), Blame.POLICY),
        (hidden, Blame.POLICY),
        (raising(OSError(errno.ENOSPC, "x")), Blame.INFRASTRUCTURE),
        (raising(OSError(errno.EIO, "x")), Blame.INFRASTRUCTURE),
        (raising(ConnectionResetError()), Blame.INFRASTRUCTURE),
        (raising(TimeoutError()), Blame.INFRASTRUCTURE),
        (raising(MemoryError()), Blame.INFRASTRUCTURE),
        (raising(ModuleNotFoundError("x")), Blame.INFRASTRUCTURE),
        (raising(InfrastructureFailure("x")), Blame.INFRASTRUCTURE),
        (from_a_connection, Blame.INFRASTRUCTURE),
        (while_handling_a_full_disk, Blame.INFRASTRUCTURE),
        (grouped, Blame.INFRASTRUCTURE),
        (raising(DataFailure("row", "x")), Blame.DATA),
    ],
)
def test_who_broke_it(work: Callable[[], None], who: Blame) -> None:
    with pytest.raises(Exception) as found:  # noqa: PT011
        work()
    assert blame(found.value) is who


def test_what_another_process_raised_is_judged_by_its_names() -> None:
    assert blame_of([Raised(["JSONDecodeError", "ValueError", "Exception"])]) is Blame.POLICY
    assert blame_of([Raised(["OSError", "Exception"], errno.EMFILE)]) is Blame.INFRASTRUCTURE
    assert (
        blame_of([Raised(["KeyError"]), Raised(["APITimeoutError", "APIConnectionError"])])
        is Blame.INFRASTRUCTURE
    )
    assert (
        blame_of([Raised(["TargetClosedError", "Error", "Exception"])]) is Blame.INFRASTRUCTURE
    ), "Playwright's, of a browser"
    assert (
        blame_of([Raised(["InvalidSessionIdException", "WebDriverException"])])
        is Blame.INFRASTRUCTURE
    ), "Selenium's"
    assert blame_of([]) is Blame.POLICY


def test_foreign_code_that_carries_out_a_move() -> None:
    with (
        pytest.raises(PolicyFailure, match=r"the move raised KeyError: 'e9'"),
        carrying_out("the move"),
    ):
        raise KeyError("e9")
    with pytest.raises(ToolDeadline), carrying_out("the move"):
        raise ToolDeadline("late")
    with pytest.raises(ConnectionError), carrying_out("the move"):
        raise ConnectionError
