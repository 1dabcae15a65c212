"""Renders UI grounding on MiniWoB++ pages with a real Chromium: ``python -m
tools.makers.rendered_pages --out DIR``. A row is kept only when the page rewards a real click
on the middle of the target. Splits share page types (``ood`` has its own), never seeds, and no
screenshot occurs with the same instruction twice. The files are parquet in Arc Vision's schema.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

from PIL import Image

from rayloop.core.failures import ConfigError, InfrastructureFailure

PAGES = (
    "click-button",
    "click-color",
    "click-dialog",
    "click-dialog-2",
    "click-test",
    "click-test-2",
    "click-widget",
    "focus-text",
)
"""Page types whose target does not follow from the instruction alone."""
OOD_PAGES = ("focus-text-2", "identify-shape")
ALL_PAGES = (*PAGES, *OOD_PAGES)
ROWS = {"test": 304, "val": 104, "train": 3000, "ood": 150}
"""Rows of the shipped set."""
SPLITS = ("test", "val", "ood", "train", "pretrain")
"""All splits; a screenshot that occurs twice stays in the first of them."""

WIDTH, HEIGHT, COLOURS = 160, 210, 64
SHIPPED = Path(__file__).parents[2] / "recipes/arc_vision/pages"
WEIGHTS = {"task": 0.6, "tool": 0.3, "gate": 0.1}
_VIEWPORT = {"width": 500, "height": 320}  # wider than the page: a dialog must not scroll it
_AWAY_POINT = (
    490,
    310,
)  # where the mouse rests during a screenshot, so that nothing is drawn as hovered
_MIN_SIDE_PIXELS = 4
_BROWSER_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_TIMEOUT_MS = 20_000


@dataclass(frozen=True, slots=True)
class PageRow:
    """One verified page: ``box`` is x1, y1, x2, y2 as fractions of the screenshot, ``png`` its
    bytes.
    """

    id: str
    page: str
    instruction: str
    box: tuple[float, float, float, float]
    png: bytes

    @property
    def screenshot(self) -> str:
        """Hash of the picture, which identifies it."""
        return hashlib.sha256(self.png).hexdigest()[:16]


@dataclass(slots=True)
class RenderedPages:
    """The rows of one page type by split, and why the other seeds were not used."""

    rows: dict[str, list[PageRow]]
    counts: Counter[str] = field(default_factory=Counter)


def prepare(
    out: Path, rows: Mapping[str, int], browser: str | None = None, jobs: int = 2
) -> dict[str, Any]:
    """Render ``rows[split]`` rows for each split into ``out``, and return the manifest.

    A page type with fewer screens gives fewer rows. Raises ConfigError (unknown split, no Chromium,
    missing packages) and InfrastructureFailure (the browser failed).
    """
    if unknown := [split for split in rows if split not in SPLITS]:
        raise ConfigError(f"no split is called {', '.join(unknown)}; there are {', '.join(SPLITS)}")
    browser = find_browser(browser)
    wanted = [_share(rows, page) for page in ALL_PAGES]
    rendered = []
    with ProcessPoolExecutor(jobs) as pool:
        for page, result in zip(
            ALL_PAGES, pool.map(render, ALL_PAGES, wanted, repeat(browser)), strict=True
        ):
            print(
                f"{page}: "
                + ", ".join(f"{count} {verdict}" for verdict, count in result.counts.items()),
                flush=True,
            )
            rendered.append(result)
    out.mkdir(parents=True, exist_ok=True)
    splits = {
        split: _interleaved([page.rows[split] for page in rendered if split in page.rows])
        for split in rows
    }
    for split, members in splits.items():
        write_parquet(out / f"{split}.parquet", split, members)
    manifest = {
        "made_with": (
            {name: version(name) for name in ("miniwob", "pillow")}
            | {"chromium": browser_version(browser)}
        ),
        "splits": {
            split: {
                "rows": len(members),
                "pages": dict(Counter(row.page for row in members)),
                "sha256": digest(members),
            }
            for split, members in splits.items()
        },
        "seeds": {
            page: dict(result.counts) for page, result in zip(ALL_PAGES, rendered, strict=True)
        },
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def find_browser(path: str | None) -> str:
    """The Chromium to use: ``path``, else the system's.

    Raises ConfigError when there is none or Playwright is missing.
    """
    try:
        import miniwob  # noqa: F401
        import playwright  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f'{error.name} is not installed; rendering pages needs: pip install "rayloop[browser]"'
        ) from error
    found = (
        path
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None or not os.access(found, os.X_OK):
        raise ConfigError(
            f"{found or 'chromium'} is no program here: install Debian's chromium, or name one with"
            " --browser"
        )
    return found


def browser_version(browser: str) -> str:
    """The browser's own version, as "156.0.8078.79"."""
    with _page(browser) as page:
        return str(page.context.browser.version)


def render(page: str, rows: Mapping[str, int], browser: str) -> RenderedPages:
    """Verified rows of one page type; runs in a process of its own."""
    import miniwob
    from playwright.sync_api import Error

    html = Path(miniwob.__file__).parent / "html" / "miniwob" / f"{page}.html"
    result = RenderedPages({split: [] for split in rows})
    seen: set[tuple[str, str]] = set()
    try:
        with _page(browser) as tab:
            tab.goto(html.as_uri())
            tab.evaluate(
                (Path(__file__).parent / "arc_vision/targets.js").read_text(encoding="utf-8")
            )
            for split, members in result.rows.items():
                for attempt in range(4 * rows[split] + 50):
                    if len(members) == rows[split]:
                        break
                    row, verdict = _episode(tab, page, f"{split}-{page}-{attempt}")
                    if row is not None and (row.screenshot, row.instruction) in seen:
                        row, verdict = None, "seen before"
                    result.counts[verdict] += 1
                    if row is not None:
                        seen.add((row.screenshot, row.instruction))
                        members.append(row)
    except Error as error:
        raise InfrastructureFailure(f"{browser} failed on the page {page}: {error}") from error
    return result


def _episode(tab: Any, page: str, seed: str) -> tuple[PageRow | None, str]:
    """The row of a seed, or None and why there is none."""
    tab.mouse.move(*_AWAY_POINT)
    episode = tab.evaluate("([page, seed]) => rayloopEpisode(page, seed)", [page, seed])
    if len(episode["boxes"]) != 1:
        return None, "not one target"
    x1, y1, x2, y2 = episode["boxes"][0]
    if min(x1, y1) < 0 or x2 > WIDTH or y2 > HEIGHT or min(x2 - x1, y2 - y1) < _MIN_SIDE_PIXELS:
        return None, "outside or tiny"
    shot = tab.screenshot(
        clip={"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT}, animations="disabled"
    )
    tab.mouse.click((x1 + x2) / 2, (y1 + y2) / 2)
    if tab.evaluate("() => WOB_RAW_REWARD_GLOBAL") <= 0:
        return None, "click not rewarded"
    box = (round(x1 / WIDTH, 4), round(y1 / HEIGHT, 4), round(x2 / WIDTH, 4), round(y2 / HEIGHT, 4))
    return PageRow(seed, page, episode["instruction"], box, _reduced(shot)), "kept"


@contextmanager
def _page(browser: str) -> Iterator[Any]:
    """A tab of a new headless browser, closed on exit."""
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=browser, args=_BROWSER_OPTIONS) as opened,
    ):
        tab = opened.new_page(viewport=_VIEWPORT)
        tab.set_default_timeout(_TIMEOUT_MS)
        yield tab


def _reduced(screenshot: bytes) -> bytes:
    """The screenshot as a PNG of at most 64 colours, about 2 kB."""
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    file = io.BytesIO()
    image.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
        file, "PNG", optimize=True
    )
    return file.getvalue()


def _share(rows: Mapping[str, int], page: str) -> dict[str, int]:
    """How many rows of each split a page type gives, in the order of ``SPLITS``."""
    shares = {}
    for split in (split for split in SPLITS if split in rows):
        pages = OOD_PAGES if split == "ood" else PAGES
        if page in pages:
            shares[split] = rows[split] // len(pages) + (
                pages.index(page) < rows[split] % len(pages)
            )
    return shares


def _interleaved(pages: list[list[PageRow]]) -> list[PageRow]:
    """Round robin over the page types, so that each prefix of a split has all of them."""
    return [
        page[index]
        for index in range(max(map(len, pages), default=0))
        for page in pages
        if index < len(page)
    ]


def digest(rows: list[PageRow]) -> str:
    """One hash of all ids, instructions, boxes and screenshots.

    It does not depend on the parquet writer.
    """
    lines = (json.dumps([row.id, row.instruction, row.box, row.screenshot]) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def write_parquet(path: Path, split: str, rows: list[PageRow]) -> None:
    """Write rows in Arc Vision's schema; the screenshot's bytes take the place of its path."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(
        [_arc_row(split, index, row) for index, row in enumerate(rows)]
    )
    pyarrow.parquet.write_table(table, path, compression="zstd")


def _arc_row(split: str, index: int, row: PageRow) -> dict[str, Any]:
    return {
        "data_source": "arc_vision",
        "prompt": [{"role": "user", "content": f"<image>{row.instruction}"}],
        "images": [{"bytes": row.png}],
        "ability": "ui_detection",
        "ground_truth": list(row.box),
        "reward_model": {
            "style": "arc_vision",
            "ground_truth": list(row.box),
            "reward_weights": WEIGHTS,
        },
        "extra_info": {
            "id": row.id,
            "split": split,
            "index": index,
            "original_instruction": row.instruction,
            "original_bbox": list(row.box),
            "element_type": row.page,
            "screenshot_id": row.screenshot,
        },
    }


def read_parquet(path: Path) -> list[PageRow]:
    """The rows of a file that ``write_parquet`` wrote."""
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(
        path, columns=["images", "ground_truth", "extra_info"]
    ).to_pylist()
    return [
        PageRow(
            row["extra_info"]["id"],
            row["extra_info"]["element_type"],
            row["extra_info"]["original_instruction"],
            tuple(row["ground_truth"]),
            row["images"][0]["bytes"],
        )
        for row in rows
    ]


def differences(ours: list[PageRow], theirs: list[PageRow]) -> Iterator[str]:
    """One sentence for each row that differs between two sets of the same split."""
    ours_by_id, theirs_by_id = {row.id: row for row in ours}, {row.id: row for row in theirs}
    for row_id in sorted(ours_by_id.keys() ^ theirs_by_id.keys()):
        yield f"{row_id}: only in the {'new' if row_id in ours_by_id else 'shipped'} set"
    for row_id in ours_by_id.keys() & theirs_by_id.keys():
        a, b = ours_by_id[row_id], theirs_by_id[row_id]
        if a.instruction != b.instruction:
            yield f"{row_id}: the instruction is {a.instruction!r}, shipped {b.instruction!r}"
        if a.box != b.box:
            yield f"{row_id}: the box is {a.box}, shipped {b.box}"
        if a.png != b.png:
            yield f"{row_id}: {_different_pixels(a.png, b.png)} pixels differ"


def _different_pixels(a: bytes, b: bytes) -> int:
    from PIL import ImageChops

    first, second = (Image.open(io.BytesIO(data)).convert("RGB") for data in (a, b))
    return (
        ImageChops.difference(first, second)
        .convert("L")
        .point(lambda value: 255 * (value > 0))
        .histogram()[255]
    )


SHOWN_DIFFERENCES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the splits into a folder and compare them with the shipped set.

    Returns exit code 0; raises RayloopError.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tools.makers.rendered_pages", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="SPLIT=N",
        help="another number of rows than shipped; may be repeated",
    )
    parser.add_argument("--browser", help="the Chromium to use (default: the system's)")
    parser.add_argument("--jobs", type=int, default=2, help="browsers at once")
    chosen = parser.parse_args(arguments)
    manifest = prepare(chosen.out, {**ROWS, **asked(chosen.rows)}, chosen.browser, chosen.jobs)
    print(
        "made with "
        + ", ".join(f"{name} {version}" for name, version in manifest["made_with"].items())
    )
    for split, described in manifest["splits"].items():
        print(
            f"{chosen.out / split}.parquet: {described['rows']} rows, sha256 {described['sha256']}"
        )
        print(f"  {compared(chosen.out, split)}")
    return 0


def asked(items: Sequence[str]) -> dict[str, int]:
    """Rows per split, from ``SPLIT=N``. Raises ConfigError."""
    rows = {}
    for item in items:
        split, _, count = item.partition("=")
        if not count.isdigit():
            raise ConfigError(f"--rows {item}: expected SPLIT=N, for example train=500")
        rows[split] = int(count)
    return rows


def compared(out: Path, split: str) -> str:
    """How a new split compares with the shipped one of that name."""
    shipped = SHIPPED / f"{split}.parquet"
    if not shipped.is_file():
        return "no such split is shipped"
    ours, theirs = read_parquet(out / f"{split}.parquet"), read_parquet(shipped)
    different = list(differences(ours, theirs))
    if not different:
        return f"equal to the {len(theirs)} shipped rows"
    more = (
        f"\n  and {len(different) - SHOWN_DIFFERENCES} more"
        if len(different) > SHOWN_DIFFERENCES
        else ""
    )
    return (
        f"{len(different)} differences from the shipped rows:\n  "
        + "\n  ".join(different[:SHOWN_DIFFERENCES])
        + more
    )


if __name__ == "__main__":
    sys.exit(main())
