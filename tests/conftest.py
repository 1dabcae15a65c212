"""For all tests: no hub, and threads that sleep while they wait, since tests share few cores with actors."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
