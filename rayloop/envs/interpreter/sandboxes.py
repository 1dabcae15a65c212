"""The sandboxes of this process: one for each set of options, shared by all episodes, ended with the process."""

from __future__ import annotations

import atexit
import threading
from typing import Literal

from rayloop.core.failures import ConfigError
from rayloop.sandbox import levels
from rayloop.sandbox.host import Sandbox
from rayloop.sandbox.options import Level, Options

Minimum = Literal["process", "filtered", "namespaces"]
_sandboxes: dict[Options, Sandbox] = {}
_lock = threading.Lock()


def sandbox(minimum: Minimum, options: Options) -> Sandbox:
    """The strongest that works here. Raises ConfigError when that is less than ``minimum``."""
    require(minimum)
    level = levels.reached().level
    assert level is not None
    with _lock:
        if options not in _sandboxes:
            if not _sandboxes:
                atexit.register(close)
            _sandboxes[options] = Sandbox(level, options)
        return _sandboxes[options]


def require(minimum: Minimum) -> str:
    """What this machine gives, in words. Raises ConfigError when it is less."""
    found = levels.reached()
    if found.short_of(Level(minimum)):
        raise ConfigError(
            f"sandbox.minimum: {minimum} is not reached here, only {found}. Code of the policy is not run. Use a newer kernel or "
            "another container profile (docs/security.md, The sandbox), or, where you trust what the policy writes, lower it"
        )
    return str(found)


def close() -> None:
    """End all of them."""
    with _lock:
        for one in _sandboxes.values():
            one.close()
        _sandboxes.clear()
