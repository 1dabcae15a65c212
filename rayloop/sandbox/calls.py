"""System calls by name: (number on x86_64, number on aarch64), from the kernel's asm/unistd_64.h
and asm-generic/unistd.h.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Number = tuple[int | None, int | None]

_LISTS: Mapping[str, Any] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def _of(name: str) -> dict[str, Number]:
    """The calls of one list; the file groups them by what they are for."""
    return {
        call: (x86_64, aarch64)
        for group in _LISTS[name].values()
        for call, (x86_64, aarch64) in group.items()
    }


ALWAYS, WRITING, CONDITIONAL = _of("always"), _of("writing"), _of("conditional")
"""For computing, drawing and reading; where it has a folder of its own; and with the arguments of
rayloop/sandbox/seccomp.py.
"""
SOCKET = _of("socket")["socket"]
OF_ADMINISTRATORS = _of("of_administrators")
"""No program of a desktop needs them."""
