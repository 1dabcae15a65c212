"""The cache: its limit, what goes first, what stays while it is in use, and that of many threads
one makes a value.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rayloop.core.threads import Cache


def keys(cache: Cache[str, str], asked: str) -> str:
    """Those of ``asked`` that are there; looking makes them the most recently used ones, in this
    order.
    """
    return "".join(key for key in asked if cache.get(key) is not None)


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache: Cache[str, str] = Cache(10, len)
    for key in "abc":
        cache.put(key, "xxx")
    assert cache.get("a") == "xxx"
    cache.put("d", "xxxx")
    assert (keys(cache, "abcd"), cache.used, len(cache)) == ("acd", 10, 3)
    cache.put("d", "x")
    assert (keys(cache, "abcd"), cache.used) == (
        "acd",
        7,
    ), "the earlier value of a key counts no more"


def test_a_value_larger_than_the_limit_is_not_kept() -> None:
    cache: Cache[str, str] = Cache(3, len)
    cache.put("a", "xx")
    cache.put("large", "xxxx")
    assert (cache.get("large"), cache.used, len(cache)) == (None, 0, 0)
    assert cache.made("large", lambda: "yyyy") == "yyyy"
    assert cache.used == 0


def test_what_is_in_use_stays_beyond_the_limit() -> None:
    busy = {"a", "b"}
    cache: Cache[str, str] = Cache(4, len, busy.__contains__)
    for key in "abcd":
        cache.put(key, "xxx")
    assert keys(cache, "abcd") == "ab"
    assert cache.used == 6
    busy.clear()
    cache.shrink()
    assert (keys(cache, "ab"), cache.used) == ("b", 3)


def test_of_many_threads_one_makes_the_value() -> None:
    cache: Cache[str, list[int]] = Cache(10)
    made: list[int] = []
    together = threading.Barrier(8)

    def make() -> list[int]:
        made.append(1)
        time.sleep(0.1)
        return made

    def ask(_: int) -> list[int]:
        together.wait(10)
        return cache.made("a", make)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert made == [1]
    assert all(one is made for one in found)


def test_what_could_not_be_made_is_tried_again_by_the_next() -> None:
    cache: Cache[str, str] = Cache(10)

    def fail() -> str:
        raise OSError("away")

    for _ in range(2):
        with pytest.raises(OSError, match="away"):
            cache.made("a", fail)
    assert cache.made("a", lambda: "there") == "there"
    assert cache.made("a", fail) == "there"


def test_a_cleared_cache_is_empty_and_fills_again() -> None:
    cache: Cache[str, str] = Cache(4, len)
    cache.put("a", "four")
    cache.clear()
    assert (cache.get("a"), len(cache), cache.used) == (None, 0, 0)
    cache.put("b", "four")
    assert (cache.get("b"), cache.used) == ("four", 4)
