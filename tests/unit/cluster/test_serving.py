"""The watch over what is served: it ends with what it is served for, whatever Ray does."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from rayloop.cluster.stages import serving


def test_a_cluster_that_is_gone_holds_up_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks a cluster without a head for a minute; the run whose endpoint is watched has ended
    meanwhile.
    """
    gone = threading.Event()
    monkeypatch.setattr(serving, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(serving, "STATUS_TIMEOUT_S", 0.05)
    asked: list[bool] = []

    def status() -> None:
        asked.append(True)
        gone.wait(60)

    monkeypatch.setattr(serving, "ray_serve", SimpleNamespace(status=status))
    watching = threading.Thread(
        target=serving.watch, args=("policy", "policy", lambda: len(asked) < 2), daemon=True
    )
    watching.start()
    watching.join(10)
    gone.set()
    assert not watching.is_alive()
    assert len(asked) == 2
