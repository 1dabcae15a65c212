"""Writes MiniWoB++ tasks.

``python -m rayloop data prepare arpo --out DIR`` makes train.jsonl and val.jsonl.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayloop.envs.grammar.family import BARE, INSTRUCTION
from rayloop.recipes import preparer, write_rows

PAGES = (
    "click-button",
    "click-button-sequence",
    "click-dialog",
    "click-dialog-2",
    "click-tab",
    "click-test",
    "click-test-2",
    "focus-text",
    "focus-text-2",
)
"""Random clicks are rewarded now and then on each.

A click outside of all elements costs a turn; most wrong ones end the episode.
"""
ROWS = {"train": 900, "val": 72}
"""Numbers of rows in the shipped splits."""


Prompt = str | list[dict[str, str]] | dict[str, str]
"""A row's prompt: one text, or messages, or only the task."""


def rows(
    split: str, count: int, prompt: Prompt = INSTRUCTION, pages: tuple[str, ...] = PAGES
) -> Iterator[Mapping[str, Any]]:
    """``count`` rows in turn over the pages.

    Seeds begin with the split's name, so no split has a page of another.
    """
    for number in range(count):
        index, position = divmod(number, len(pages))
        page = pages[position]
        seed = f"{split}-{page}-{index}"
        yield {"id": seed, "data_source": page, "prompt": prompt, "page": page, "seed": seed}


_PUBLISHED = Path(__file__).parent / "prompts"
ORIGINAL: Prompt = [
    {"role": role, "content": (_PUBLISHED / f"{name}.txt").read_text(encoding="utf-8")}
    for role, name in (("system", "system"), ("user", "uitars"))
]
"""ARPO's messages before the first screen, for environments with ``variant: original``.

Texts: dvlab-research/ARPO (Apache-2.0).
"""
PROMPTS: Mapping[str, Prompt] = {"bare": INSTRUCTION, "language": BARE, "original": ORIGINAL}
"""The prompts by name: the instruction alone, that of the model's language, or that of ARPO.

Explanations do not help a tiny model.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files. Returns exit code 0; raises RayloopError."""
    parser = preparer("arpo", __doc__)
    parser.add_argument(
        "--prompt",
        choices=PROMPTS,
        default="bare",
        help="prompt of the rows (default: %(default)s)",
    )
    parser.add_argument(
        "--pages",
        nargs="+",
        default=list(PAGES),
        help="names of MiniWoB++ pages (default: the shipped ones)",
    )
    for split, count in ROWS.items():
        parser.add_argument(
            f"--{split}", type=int, default=count, help=f"rows of {split} (default: {count})"
        )
    options = parser.parse_args(arguments)
    prompt = PROMPTS[options.prompt]
    pages = tuple(options.pages)
    for split in ROWS:
        count = getattr(options, split)
        write_rows(options.out, split, rows(split, count, prompt, pages))
    return 0
