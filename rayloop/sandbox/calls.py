"""System calls by name: (number on x86_64, number on aarch64).

The numbers come from the kernel's asm/unistd_64.h and asm-generic/unistd.h.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Number = tuple[int | None, int | None]

_LISTS: Mapping[str, Any] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)


def _calls(list_name: str) -> dict[str, Number]:
    """The calls of one list; the file groups them by purpose."""
    numbers: dict[str, Number] = {}
    for group in _LISTS[list_name].values():
        for call, (x86_64, aarch64) in group.items():
            numbers[call] = (x86_64, aarch64)
    return numbers


ALWAYS = _calls("always")
"""The calls for computing, drawing and reading."""
WRITING = _calls("writing")
"""The calls of an interpreter that has a folder."""
CONDITIONAL = _calls("conditional")
"""The calls that rayloop/sandbox/seccomp.py allows with some arguments only."""
SOCKET = _calls("socket")["socket"]
OF_ADMINISTRATORS = _calls("of_administrators")
"""The calls that no program of a desktop needs."""
