"""The pictures of the console in docs/: of a run's overview (light, and on a phone), and of its
first recorded group (dark).

python -m tests.envs.console_pictures RUN_DIR RUN_DIR_WITH_PICTURES docs
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

from rayloop.run.folder import RunFolder
from rayloop.view.reader import rollout_groups
from tests.envs.test_console import PHONE, shown

LARGEST = 150_000
"""Bytes of a picture."""


def main(overview: Path, strips: Path, out: Path) -> None:
    """Write the three pictures."""
    first = next(rollout_groups(RunFolder.begun(strips)))[0]
    group = f"/step/{first['step']}/group/{first['group']}"
    wide = {"width": 1180, "height": 900}
    save(overview, "/", out / "console.png", viewport=wide)
    save(
        strips,
        group,
        out / "console_dark.png",
        viewport={"width": 1180, "height": 620},
        color_scheme="dark",
    )
    save(overview, "/", out / "console_phone.png", viewport=PHONE)


def save(run: Path, path: str, file: Path, **options: object) -> None:
    """A picture of a page, in 256 colours."""
    with shown(RunFolder.begun(run), **options) as page:
        page.goto(path)
        page.wait_for_load_state("networkidle")
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256).save(file, optimize=True)
    assert file.stat().st_size < LARGEST, f"{file}: {file.stat().st_size} bytes"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
