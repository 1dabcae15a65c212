"""Which of several recorded answers a request gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from rayloop.envs.browser.recording import Key, Recording, SiteAnswer

PRICES = (b"11 EUR", b"12 EUR")
GUEST = "session=1"
CUSTOMER = "session=1; user=ada"


def address(recording: Recording, milliseconds: int) -> str:
    return f"http://shop/price?_={recording.moment * 1000 + milliseconds}"


def keep(
    recording: Recording,
    times: Sequence[int],
    prices: Sequence[bytes],
    cookies: str,
    seen: Counter[Key],
) -> None:
    """Record the prices that a page got; ``times`` in milliseconds after the moment."""
    for milliseconds, price in zip(times, prices, strict=True):
        request = recording.request("GET", address(recording, milliseconds), b"", cookies)
        assert recording.keep(request, SiteAnswer(200, {}, price), seen)


def prices_of(
    recording: Recording, times: Sequence[int], cookies: str, seen: Counter[Key]
) -> list[bytes]:
    bodies = []
    for milliseconds in times:
        request = recording.request("GET", address(recording, milliseconds), b"", cookies)
        answer = recording.find(request, seen)
        assert answer is not None
        bodies.append(answer.body)
    return bodies


@pytest.mark.parametrize(
    ("asked", "again"),
    [((0, 0), (0, 900)), ((0, 900), (0, 0)), ((0, 0), (0, 0)), ((0, 900), (100, 200))],
    ids=["slower", "faster", "the same", "at other times"],
)
def test_the_order_of_answers_does_not_depend_on_the_time(
    tmp_path: Path, asked: Sequence[int], again: Sequence[int]
) -> None:
    """``asked``: milliseconds at which the page asked for a price; ``again``: in the replay."""
    recording = Recording(tmp_path / "shop", writes=True)
    keep(recording, asked, PRICES, "", Counter())
    replay = Recording(tmp_path / "shop")
    assert prices_of(replay, again, "", Counter()) == [*PRICES]


@pytest.mark.parametrize("again", [(20, 20), (3, 20), (1, 50)])
@pytest.mark.parametrize("cookies", [(GUEST, CUSTOMER), ("", "")], ids=["login", "no cookies"])
def test_a_page_does_not_get_the_answer_of_another_page_at_the_same_millisecond(
    tmp_path: Path, again: Sequence[int], cookies: tuple[str, str]
) -> None:
    """Each page's clock begins at the moment of the recording."""
    recording = Recording(tmp_path / "shop", writes=True)
    seen: Counter[Key] = Counter()
    before, after = cookies
    keep(recording, (1, 50), PRICES, before, seen)
    keep(recording, (3, 20), (b"13 EUR", b"14 EUR"), after, seen)

    replay = Recording(tmp_path / "shop")
    played: Counter[Key] = Counter()
    assert prices_of(replay, again, before, played) == [*PRICES]
    assert prices_of(replay, again, after, played) == [b"13 EUR", b"14 EUR"]


def test_a_second_visit_is_not_recorded_again(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "shop", writes=True)
    keep(recording, (1, 50), PRICES, GUEST, Counter())
    keep(recording, (7, 80), (b"other", b"other"), GUEST, Counter())
    assert len((tmp_path / "shop" / "index.jsonl").read_text().splitlines()) == 1 + len(PRICES)


def test_another_second_is_another_address(tmp_path: Path) -> None:
    """A calendar asks for days and hours by their times."""
    recording = Recording(tmp_path / "shop", writes=True)
    keep(recording, (0, 3_600_000), PRICES, "", Counter())
    replay = Recording(tmp_path / "shop")
    assert prices_of(replay, (3_600_000,), "", Counter()) == [PRICES[1]]
