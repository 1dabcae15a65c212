"""A reward for models with random weights: it differs from answer to answer, and means nothing.

Light, as reward actors are.
"""

from __future__ import annotations

import zlib

from rayloop.core.protocols import ScoreContext


def spread(context: ScoreContext) -> float:
    """A number from 0 to 1 that depends on the texts alone."""
    return zlib.crc32("".join(context.texts).encode()) / 2**32
