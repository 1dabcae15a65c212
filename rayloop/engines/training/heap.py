"""Keeps freed memory in the process, for the next update."""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, in glibc's malloc.h
_NEVER, _LARGEST = -1, 2**31 - 1


def keep_freed() -> None:
    """Let this process keep the memory that it frees; glibc otherwise gives blocks above 32 MiB back to the kernel.

    The kernel fills each page anew with zeros when it is touched: 690,000 faults and an eighth of the CPU time of an update of
    16,384 tokens (docs/performance.md). The process stays as large as its largest moment. Does nothing with another C library.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if not (mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, _NEVER)):
        logger.info("the C library gives freed memory back at once: updates on this CPU take somewhat longer")


def grow_segments() -> None:
    """Let PyTorch grow its blocks on a GPU instead of adding blocks, since micro-batches differ in length. Call it before torch is
    imported. Environment variables of the user win."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
