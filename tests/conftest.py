"""For all tests: no hub, nothing of this machine (tests/support/hermetic.py), and threads that spin
only briefly while they wait, since tests share few cores with actors.

For the same reason no example of hypothesis has a deadline: on a busy machine any may take half a
second.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from rayloop.cli import SPINS
from rayloop.launch.restarts import RESTARTED
from tests.support import hermetic

os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
os.environ["RAY_ENABLE_AUTO_CONNECT"] = (
    "0"  # a call outside a cluster is an error: it would start one, for all tests that follow
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")
hermetic.hold()


def pytest_collection_finish() -> None:
    """Leave what pytest has collected out of garbage collection.

    Ten thousand tests live until the end: each full collection took 0.4 seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _hermetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test may use of this machine."""
    hermetic.marks.clear()
    hermetic.marks.update(mark.name for mark in request.node.iter_markers())
    monkeypatch.setattr(hermetic, "running", True)


@pytest.fixture(autouse=True)
def _first_start() -> Iterator[None]:
    """A command that starts a program remembers in the environment that the next one continues it."""
    os.environ.pop(RESTARTED, None)
    yield
    os.environ.pop(RESTARTED, None)
