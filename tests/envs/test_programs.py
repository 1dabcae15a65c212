"""The lane itself: a browser can be started, and a program that is missing makes a test skip with a
reason.
"""

from __future__ import annotations

import subprocess

import pytest

from tests.envs.programs import PACKAGES, missing, needs

pytestmark = pytest.mark.env


def test_what_is_missing_is_named() -> None:
    assert missing(["sh", "no-such-program"]) == ["no-such-program"]
    mark = needs("sh", "no-such-program").mark
    assert mark.args == (True,)
    assert "no-such-program" in mark.kwargs["reason"]
    assert needs("sh").mark.args == (False,)


@needs(*PACKAGES)
def test_the_programs_run() -> None:
    done = subprocess.run(
        ["chromium-headless-shell", "--version"], capture_output=True, text=True, timeout=60
    )
    assert "hrom" in done.stdout
