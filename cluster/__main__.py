"""``python -m cluster``, and the script ``rayloop``."""

import sys
from pathlib import Path

from cluster.shadow import hiding


def main() -> int:
    """Run one command and return its exit code; 2 when a module of the current directory hides one of ours."""
    if why := hiding():
        print(f"rayloop: ConfigError: {why}", file=sys.stderr)
        return 2
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))  # a script's path does not have it, and there a person's own components are
    from cluster.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
