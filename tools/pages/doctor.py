"""``python -m tools.pages.doctor`` prints docs/doctor.md."""

from __future__ import annotations

import inspect

from rayloop.doctor.checks import checks

HEADER = """# doctor

Made by `python -m tools.pages.doctor`; do not edit.

`python -m rayloop doctor [CONFIG] [--address ...] [--port ...] [--json]` looks at this machine
without starting anything. Each finding has a level: *error*, a run would fail; *warning*, it would
be slow, exposed to others, or not what was tested; and a remedy, which is printed with what was
found. With a CONFIG it also predicts checkpoints and memory. The exit code is 1 when there is an
error, else 0 (2: the CONFIG itself is wrong).

| check | what it looks at, and how serious it takes it |
|---|---|"""


def page() -> str:
    """docs/doctor.md: what each check says about what it looks at."""
    rows = [
        f"| {name} | {_about(check.func.__doc__ or '')} |"
        for name, check in checks(None, None, None, []).items()
    ]
    return "\n".join([HEADER, *rows, ""])


def _about(docstring: str) -> str:
    """The docstring as the text of a cell, without a paragraph about the function's parameters."""
    summary, *more = inspect.cleandoc(docstring).split("\n\n")
    text = " ".join([summary, *(part for part in more if not part.startswith("``"))])
    return " ".join(text.split()).replace("``", "`")


if __name__ == "__main__":
    print(page(), end="")
