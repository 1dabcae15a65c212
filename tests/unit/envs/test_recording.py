"""Which of several recorded answers a request gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from rayloop.envs.browser.recording import Key, Recording, SiteAnswer

PRICES = (b"11 EUR", b"12 EUR")


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

    def address(milliseconds: int) -> str:
        return f"http://shop/price?_={recording.moment * 1000 + milliseconds}"

    seen: Counter[Key] = Counter()
    for milliseconds, price in zip(asked, PRICES, strict=True):
        request = recording.request("GET", address(milliseconds), b"", "")
        assert recording.keep(request, SiteAnswer(200, {}, price), seen)

    replay = Recording(tmp_path / "shop")
    played: Counter[Key] = Counter()
    bodies = []
    for milliseconds in again:
        answer = replay.find(replay.request("GET", address(milliseconds), b"", ""), played)
        assert answer is not None
        bodies.append(answer.body)
    assert bodies == [*PRICES]
