"""What importing MobileGym from a folder leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rayloop.core.failures import EnvironmentFailed
from rayloop.envs.browser.mobilegym import bench


def test_a_folder_without_mobilegym_is_not_searched_afterwards(tmp_path: Path) -> None:
    searched = list(sys.path)
    with pytest.raises(EnvironmentFailed, match="MobileGym cannot be imported"):
        bench(str(tmp_path))
    assert sys.path == searched
