"""The table of the menu has only entries that did something: others are no evidence that they
learn.
"""

from __future__ import annotations

import json

from benchmarks.evidence.menu import BASE, ENTRIES, RESULT, RESULTS, did_nothing, table


def seeds(value: float) -> dict[str, dict[str, float]]:
    columns = (
        *RESULTS,
        "sampled_before",
        "greedy_before",
        "entropy_first",
        "entropy_last",
        "kl_last",
        "clipped",
    )
    return {seed: dict.fromkeys(columns, value + int(seed)) for seed in "01"}


def test_an_entry_with_the_results_of_the_base_is_left_out() -> None:
    found = {BASE: seeds(0.1), "mask": seeds(0.1), "rloo": seeds(0.2), "rloo again": seeds(0.2)}
    assert did_nothing(found) == ["mask"]
    assert [line.split("|")[1] for line in table(found).splitlines()[2:]] == [
        BASE,
        "rloo",
        "rloo again",
    ]


def test_the_recorded_entries_are_the_menus() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert set(found) <= set(ENTRIES)
    assert did_nothing(found) == [
        "adaptive entropy",
        "token, mask",
        "sequence, mask",
        "geometric, mask",
        "turns",
    ]
