"""The console beside folders that others made: links, bombs, pipes, broken records and an index of
another make.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml
from fastapi.testclient import TestClient

from rayloop.run.folder import RunFolder
from rayloop.run.lock import Holder
from rayloop.serve_apps.console.app import HEADERS, web
from rayloop.serve_apps.console.content import Console
from tests.unit.view.test_trajectory_page import evaluated as evaluated
from tests.unit.view.test_trajectory_page import folder as folder

SECRET = "SECRET-OF-THE-USER"
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 8)]
)


def served(run: RunFolder) -> TestClient:
    return TestClient(
        web(run, ""), "http://localhost", follow_redirects=False, raise_server_exceptions=False
    )


REFUSED = {
    BOMB: "has more than 100000 values",
    "a: [1, 2\nb: }": "cannot be read",
    "[1, 2]": "holds no configuration",
    "a: " + "9" * 5000: "cannot be read",
    "a: " + "x" * (5 << 20): "cannot be read",
}
"""Text of a configuration -> what is said of it."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "status", "why"),
    [
        *((text, 400, why) for text, why in REFUSED.items()),
        ("steps: 9", 200, "9"),
        ("", 200, ""),
        (None, 404, "neither a run"),
    ],
)
def test_a_neighbours_configuration_harms_only_its_own_page(
    text: str | None, status: int, why: str, evaluated: RunFolder
) -> None:
    other = evaluated.path.parent / "other"
    other.mkdir()
    if text is None:
        (evaluated.path.parent / "key").write_text(SECRET, encoding="utf-8")
        (other / "config.yaml").symlink_to(evaluated.path.parent / "key")
    else:
        (other / "config.yaml").write_text(text, encoding="utf-8")
    with served(evaluated) as client:
        answer = client.get("/configuration?other=other")
        assert (answer.status_code, len(answer.content) < 100_000) == (status, True)
        assert why in answer.text or status == 200
        assert SECRET not in answer.text
        assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
        assert client.get("/").status_code == 200


ODD = (
    "rollouts?text=%00",
    "rollouts?text=a%00b",
    f"rollouts?start={'9' * 30}",
    "rollouts?start=-5",
    "events?start=-1",
)


@pytest.mark.parametrize("query", ODD)
def test_odd_queries_are_answered(query: str, evaluated: RunFolder) -> None:
    with served(evaluated) as client:
        assert client.get(f"/{query}").status_code == 200


def test_what_cannot_be_shown_has_the_content_policy_too(
    evaluated: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(evaluated) as client:
        monkeypatch.setattr(Console, "stamp", lambda console: 1 / 0)
        answer = client.get("/")
    assert (answer.status_code, "ZeroDivisionError" in answer.text) == (500, True)
    assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]


@pytest.mark.timeout(60)
def test_a_pipe_among_the_pictures_holds_nobody_up(evaluated: RunFolder) -> None:
    images = evaluated.rollouts.path / "images"
    images.mkdir(exist_ok=True)
    os.mkfifo(images / "pipe.png")
    with served(evaluated) as client:
        assert client.get("/picture/0/rollouts/images/pipe.png").status_code == 404


def test_an_index_that_is_a_link_makes_no_file_elsewhere(
    evaluated: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = evaluated.path.parent / "authorized"
    monkeypatch.setenv("XDG_CACHE_HOME", str(evaluated.path.parent / "cache"))
    (evaluated.path / "index.sqlite").symlink_to(elsewhere)
    with served(evaluated) as client:
        assert client.get("/rollouts").status_code == 200
    assert not elsewhere.exists()


def test_an_index_of_another_make_is_made_again(evaluated: RunFolder) -> None:
    db = sqlite3.connect(evaluated.path / "index.sqlite")
    db.executescript(
        "CREATE TABLE files(step INTEGER PRIMARY KEY, changed, size, why); CREATE TABLE"
        " episodes(id, step);PRAGMA user_version = 1"
    )
    db.close()
    with served(evaluated) as client:
        assert client.get("/rollouts").status_code == 200


class Judge(BaseHTTPRequestHandler):
    """A stranger's server, which keeps what it is shown."""

    shown: list[str] = []

    def do_GET(self) -> None:
        self.shown.append(self.headers.get("Authorization", ""))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_a_strangers_configuration_sends_no_key_to_his_judge(evaluated: RunFolder) -> None:
    """Not even when a lock in his folder says that the run lives, on another machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    key = evaluated.path.parent / "token"
    key.write_text(SECRET * 3, encoding="utf-8")
    key.chmod(0o600)
    judge = {"url": f"http://127.0.0.1:{server.server_port}", "key_file": str(key)}
    config = yaml.safe_load(evaluated.config.read_text(encoding="utf-8")) | {
        "reward": {"source": {"with": {"judge": judge}}}
    }
    evaluated.config.write_text(yaml.safe_dump(config), encoding="utf-8")
    evaluated.lock.path.write_text(
        json.dumps(asdict(Holder(1, "another-machine", "boot", 0.0))), encoding="utf-8"
    )
    os.utime(evaluated.lock.path, (time.time() + 3600,) * 2)
    assert evaluated.lock.holder() is not None
    with served(evaluated) as client:
        assert client.get("/judge").status_code == 200
    server.shutdown()
    assert Judge.shown == []
