"""``python -m rayloop``, which is the installed ``rayloop``."""

import sys

from rayloop.cluster.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
