"""Who is answered at all: hosts of the web that lead here, tokens in outputs, and requests that
never end.
"""

from __future__ import annotations

import io
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

from rayloop import web
from rayloop.commands.console import _token
from rayloop.core.files import write_whole
from rayloop.run.folder import RunFolder
from rayloop.serve_apps.console import app as console
from tests.support.consoles import opened
from tests.unit.view.test_trajectory_page import evaluated as evaluated
from tests.unit.view.test_trajectory_page import folder as folder

FOREIGN = (
    "evil.example",
    "evil.example:80",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "[::1",
    "1",
    "0x7f000001",
)
OWN = ("127.0.0.1", "127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:5", "10.1.2.3:8000")


def application(key: str) -> FastAPI:
    limits: Any = SimpleNamespace(bytes=100, body_seconds=1.0)

    app = FastAPI()
    app.add_middleware(web.Guard, key=key, limits=limits, who="the judge")
    app.add_api_route("/{path:path}", lambda: PlainTextResponse("data"))
    return app


@pytest.mark.parametrize("path", ["/", "/healthz"])
def test_without_a_key_a_service_answers_to_its_address_only(path: str) -> None:
    with TestClient(application("")) as client:
        for host in FOREIGN:
            answer = client.get(path, headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (421, "wrong_host"), host
        for host in OWN:
            assert client.get(path, headers={"Host": host}).text == "data", host
    with TestClient(application("key")) as client:
        known = {"Host": "judge.example", "Authorization": "Bearer key"}
        assert client.get("/", headers=known).status_code == 200, (
            "who shows a key may come by a name"
        )


def test_a_console_without_a_token_answers_to_its_address_only(evaluated: RunFolder) -> None:
    with TestClient(console.web(evaluated, "")) as client:
        for host in FOREIGN:
            answer = client.get("/", headers={"Host": host})
            assert answer.status_code == 421, host
            assert "step 3" not in answer.text
            assert (
                answer.headers["content-security-policy"]
                == console.HEADERS["Content-Security-Policy"]
            )
        for host in OWN:
            assert client.get("/", headers={"Host": host}).status_code == 200, host


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def test_the_token_is_printed_to_terminals_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path, "run")
    run.path.mkdir()
    with listening() as port:
        (run.path / "console.key").write_text("planted", encoding="utf-8")
        token = _token(run, "127.0.0.1", port)
        said = capsys.readouterr().out
        assert token not in said
        assert opened(said).endswith(f"/?token={token}"), "a file that was there is not believed"
        assert stat.S_IMODE((run.path / "console.key").stat().st_mode) == 0o600
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdout", terminal)
        token = _token(run, "127.0.0.1", port)
        assert terminal.getvalue().endswith(f"/?token={token}\n")


def test_the_token_of_a_run_that_cannot_be_written_is_beside_ones_own_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOP_RENDEZVOUS", str(tmp_path / "own"))
    (tmp_path / "run").touch()  # nothing can be written below it
    with listening() as port:
        token = _token(RunFolder(tmp_path, "run"), "127.0.0.1", port)
    said = capsys.readouterr().out
    assert opened(said).endswith(token)
    assert str(tmp_path / "own") in said


def test_a_secret_is_never_readable_by_others_not_even_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, fchmod = list[int](), os.fchmod

    def looked(handle: int, mode: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(handle).st_mode))
        fchmod(handle, mode)

    monkeypatch.setattr(os, "fchmod", looked)
    write_whole(tmp_path / "key", b"secret", mode=0o600)
    assert seen == [0o600]
