"""docs/learned.png: of a run's report the first held-out episode before and after.

python -m tests.envs.report_picture RUN_DIR docs/learned.png
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

from rayloop.view.page import write_page
from tests.envs.console_pictures import LARGEST
from tests.envs.test_report import shown


def main(run: Path, file: Path) -> None:
    """Write the picture, in 256 colours."""
    with shown(write_page(run, None, groups=0).resolve()) as page:
        picture = Image.open(
            io.BytesIO(page.locator("#learned details").first.screenshot())
        ).convert("RGB")
    picture.quantize(256).save(file, optimize=True)
    assert file.stat().st_size < LARGEST, f"{file}: {file.stat().st_size} bytes"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
