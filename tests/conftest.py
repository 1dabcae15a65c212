"""For all tests: no hub, and threads that spin only briefly while they wait, since tests share few cores with actors.

For the same reason no example of hypothesis has a deadline: on a busy machine any may take half a second.
"""

from __future__ import annotations

import os

from hypothesis import settings

from rayloop.cluster.cli import SPINS

os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")
