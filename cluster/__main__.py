"""``python -m cluster``, and the script ``rayloop``."""

import sys
from importlib.util import find_spec
from pathlib import Path

from cluster.shadow import hiding

NEEDED = ("pydantic", "ray")
"""Of what rayloop depends on: a Python without these is not that of the environment."""


def main() -> int:
    """Run one command and return its exit code; 2 when a module of the current directory hides one of ours, or
    when the environment with what we import is not active."""
    if why := hiding():
        print(f"rayloop: ConfigError: {why}", file=sys.stderr)
        return 2
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))  # a script's path does not have it, and there a person's own components are
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(
            f"rayloop: without {' and '.join(missing)}: activate the environment (README, Installing)", file=sys.stderr
        )
        return 2
    from cluster.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
