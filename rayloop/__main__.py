"""``python -m rayloop``, and the script ``rayloop``.

It checks the environment before anything else is imported.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("pydantic", "ray")
"""Dependencies of rayloop: a Python without these is not that of the environment."""


def main() -> int:
    """Run one command and return its exit code; 2 when the environment is not active."""
    try:
        return _main()
    except KeyboardInterrupt:  # during imports: commands print their own message
        print("rayloop: interrupted", file=sys.stderr)
        return 1


def _main() -> int:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        # A script's path lacks the current folder, where the user's own components are.
        sys.path.append(str(Path.cwd()))
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"rayloop: without {' and '.join(missing)}: activate the environment: ."
            " .venv/bin/activate",
            file=sys.stderr,
        )
        return 2
    try:
        from rayloop.cli import main as run
    except KeyboardInterrupt:  # the import takes a second
        print("rayloop: interrupted", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
