"""Tiny models for the contract suites; torch uses one thread."""

from tests.engines.conftest import _one_thread as _one_thread
from tests.engines.conftest import tiny_text as tiny_text
from tests.engines.conftest import tiny_vlm as tiny_vlm
