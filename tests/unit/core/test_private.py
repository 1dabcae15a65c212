"""Secrets and the files that say where to send them: who may have made them, and who may read them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayloop.core.failures import ConfigError
from rayloop.core.files import new_secret, trusted
from rayloop.launch.rendezvous import Rendezvous


def test_a_secret_that_others_can_read_is_not_kept_in_use(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("known-to-others", encoding="utf-8")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"the token .* has mode 666; others must not read it: chmod go-rwx"):
        new_secret(path, "the token")


def test_what_a_crash_left_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    assert len(new_secret(path, "the token").read_text(encoding="utf-8")) >= 32
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_users_file_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayloop.core.files.ROOT", -1)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"the folder .* belongs to user \d+, and only your own is believed"):
        trusted(tmp_path, "the folder")


def test_a_rendezvous_that_others_can_write_is_refused_by_head_and_workers(tmp_path: Path) -> None:
    """The one who prepares the folder would choose the cluster's token, or the head to which a worker goes."""
    rendezvous = Rendezvous(tmp_path, "c")
    rendezvous.folder.mkdir()
    rendezvous.folder.chmod(0o777)
    for use in (lambda: rendezvous.open(False), rendezvous.head, lambda: rendezvous.wait(0.1)):
        with pytest.raises(ConfigError, match="others must not write it: chmod go-w"):
            use()
    rendezvous.folder.chmod(0o755)
    token = rendezvous.open(False)
    assert token is not None
    assert token.stat().st_mode & 0o777 == 0o600
