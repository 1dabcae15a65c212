"""``python -m rayloop``, and the script ``rayloop``: it checks the environment before anything else
is imported.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("pydantic", "ray")
"""Of what rayloop depends on: a Python without these is not that of the environment."""


def main() -> int:
    """Run one command and return its exit code; 2 when the environment with what we import is not
    active.
    """
    try:
        return _main()
    except KeyboardInterrupt:  # while it imports: commands have words of their own
        print("rayloop: interrupted", file=sys.stderr)
        return 1


def _main() -> int:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(
            str(Path.cwd())
        )  # a script's path does not have it, and there a person's own components are
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
