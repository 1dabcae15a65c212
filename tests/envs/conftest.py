"""What the environments' tests share: browsers are ended with the module that used them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rayloop.envs.browser import host


@pytest.fixture(autouse=True, scope="module")
def _no_browser_stays() -> Iterator[None]:
    yield
    for one in list(host._hosts.values()):
        one.end()
