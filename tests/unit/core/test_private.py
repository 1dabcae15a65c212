"""Secrets and the files that say where to send them: who may have made them, and who may read them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rayloop.core import files
from rayloop.core.failures import ConfigError
from rayloop.core.files import new_secret, trusted
from rayloop.launch.rendezvous import Rendezvous


def test_a_secret_that_others_can_read_is_not_kept_in_use(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("known-to-others", encoding="utf-8")
    path.chmod(0o666)
    with pytest.raises(
        ConfigError, match=r"the token .* has mode 666; others must not read it: chmod go-rwx"
    ):
        new_secret(path, "the token")


def test_what_a_crash_left_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    assert len(new_secret(path, "the token").read_text(encoding="utf-8")) >= 32
    assert path.stat().st_mode & 0o777 == 0o600


def at_each_line(work: Callable[[], object], act: Callable[[int], None]) -> None:
    """Do ``work``, and ``act`` before each line of rayloop/core/files.py that it runs, with the
    number of lines before it.
    """
    ran, before = count(), sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != files.__file__:
            return None
        if event == "line":
            sys.settrace(None)
            act(next(ran))
            sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("left", [False, True], ids=["nothing", "an empty file"])
def test_two_processes_that_make_one_secret_have_the_same(tmp_path: Path, left: bool) -> None:
    """The first one pauses at every line in turn, while the second one makes the secret and reads
    it.
    """
    for line in count():
        path, read = tmp_path / str(line) / "token", list[str]()
        path.parent.mkdir()
        if left:
            path.touch(0o600)

        def second(ran: int, line: int = line, path: Path = path, read: list[str] = read) -> None:
            if ran == line:
                read.append(new_secret(path, "the token").read_text(encoding="utf-8"))

        at_each_line(lambda path=path: new_secret(path, "the token"), second)
        if not read:
            break
        assert read == [path.read_text(encoding="utf-8")], f"at line {line}"
        assert len(read[0]) >= 32
        assert [file.name for file in path.parent.iterdir()] == ["token"]
    assert line > 5, "lines must have been counted"


def test_nobody_sees_a_secret_before_it_is_whole(tmp_path: Path) -> None:
    path, sizes = tmp_path / "token", set[int]()
    at_each_line(
        lambda: new_secret(path, "the token"),
        lambda _: sizes.update([path.stat().st_size] if path.exists() else []),
    )
    assert sizes == {path.stat().st_size}


def test_a_secret_is_made_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = new_secret(tmp_path / "token", "the token")
    assert len(path.read_text(encoding="utf-8")) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["token"]


def test_a_file_that_others_can_read_and_that_comes_first_is_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made after this process has looked for one."""
    path, draw = tmp_path / "token", secrets.token_urlsafe

    def first(size: int) -> str:
        path.write_text("known-to-others", encoding="utf-8")
        path.chmod(0o644)
        return draw(size)

    monkeypatch.setattr(secrets, "token_urlsafe", first)
    with pytest.raises(ConfigError, match="others must not read it"):
        new_secret(path, "the token")


def test_another_users_file_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.core.files.ROOT_USER_ID", -1)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(
        ConfigError, match=r"the folder .* belongs to user \d+, and only your own is believed"
    ):
        trusted(tmp_path, "the folder")


def test_a_rendezvous_that_others_can_write_is_refused_by_head_and_workers(tmp_path: Path) -> None:
    """The one who prepares the folder would choose the cluster's token, or the head to which a
    worker goes.
    """
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
