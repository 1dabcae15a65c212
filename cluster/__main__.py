"""``python -m rayloop.cluster``: the same as ``python -m rayloop``."""

import sys

from rayloop.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
