"""The folder of a private cluster."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from rayloop.core.failures import ConfigError
from rayloop.launch.ray_variables import private_cluster


def test_a_folder_that_is_too_long_for_sockets_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("long" * 12)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match=r"too long paths\. Set TMPDIR to a folder of at most \d+ characters"), private_cluster():
        pass
    assert not any(deep.iterdir())
