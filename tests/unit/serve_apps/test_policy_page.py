"""The example of docs/policy_endpoint.md that needs no endpoint, as it stands there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/policy_endpoint.md"


def test_traces_become_trajectories_as_the_page_says() -> None:
    (code,) = re.findall(
        r"```python title=to_trajectories.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "to_trajectories.py", "exec"), {})
    assert f"# {printed.getvalue().strip()}" in code
