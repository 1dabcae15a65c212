"""For all tests: no hub, and threads that spin only briefly while they wait, since tests share few cores with actors."""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
