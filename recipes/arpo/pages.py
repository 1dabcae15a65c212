"""The tasks: MiniWoB++ pages that need few clicks, each with seeds of its own for every split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rayloop.envs.grammar.screens import INSTRUCTION

PAGES = (
    "click-button", "click-button-sequence", "click-dialog", "click-dialog-2", "click-tab",
    "click-test", "click-test-2", "focus-text", "focus-text-2",
)  # fmt: skip
"""Random clicks are rewarded now and then on each, so GRPO has a signal. A click beside everything costs a turn; most wrong ones
end the episode."""
ROWS = {"train": 900, "val": 72}
"""Numbers of rows in the shipped splits."""


def rows(split: str, count: int, prompt: str = INSTRUCTION, pages: tuple[str, ...] = PAGES) -> Iterator[Mapping[str, Any]]:
    """``count`` rows in turn over the pages. Seeds begin with the split's name, so no split has a page of another."""
    for number in range(count):
        page, index = pages[number % len(pages)], number // len(pages)
        seed = f"{split}-{page}-{index}"
        yield {"id": seed, "data_source": page, "prompt": prompt, "page": page, "seed": seed}
