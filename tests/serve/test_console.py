"""A run's console on a real Ray Serve, beside a judge: who is admitted, its links, a step that is
recorded while it serves.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from fastapi.testclient import TestClient

from rayloop.run.folder import RunFolder
from rayloop.serve_apps.console.app import web
from tests.support.consoles import opened
from tests.support.judges import Served
from tests.support.runs import ROOT, tagged
from tests.unit.view.test_trajectory_page import CONFIG as CONFIG
from tests.unit.view.test_trajectory_page import evaluated as evaluated
from tests.unit.view.test_trajectory_page import folder as folder

pytestmark = [pytest.mark.judge, pytest.mark.timeout(400)]


def place(judge: Served) -> tuple[str, Path]:
    """The address and the token of the judge's cluster."""
    (token,) = Path(psutil.Process(judge.process.pid).environ()["TMPDIR"]).glob("rayloop-*/token")
    words = [word for process in tagged(judge.tag) for word in process.cmdline()]
    (address,) = {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    return address, token


def command(judge: Served, *words: object) -> dict[str, Any]:
    address, token = place(judge)
    options = ("--address", address, "--token-file", token, *words)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "PYTHONPATH": str(ROOT)
    }
    return {
        "args": [sys.executable, "-m", "rayloop", "console", *map(str, options)],
        "env": environment,
        "text": True,
    }


@contextmanager
def console(judge: Served, run: RunFolder, *options: str) -> Iterator[str]:
    """Its address; asked to end, the command ends well, and says so."""
    with subprocess.Popen(**command(judge, run.path, *options), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("console: "))
            yield opened(line)
            process.terminate()
            assert "console: received a signal, ending" in process.stdout.read()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_the_console_of_a_run_is_served_beside_the_judge_and_shows_its_new_steps(
    judge: Served, evaluated: RunFolder
) -> None:
    with console(judge, evaluated) as address, httpx.Client(trust_env=False) as http:
        base, _, token = address.partition("/?token=")
        assert base == f"{judge.url}/console/run"
        key = evaluated.path / "console.key"
        assert (key.read_text(encoding="utf-8"), stat.S_IMODE(key.stat().st_mode)) == (token, 0o600)
        for path in ("/", "/rollouts", "/file/console.js", "/?token=wrong"):
            assert http.get(f"{base}{path}").status_code == 401, path
        assert http.get(f"{base}/", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        shown = http.get(address)
        assert (shown.status_code, shown.headers["location"]) == (303, f"{base}/")
        page = http.get(f"{base}/")
        assert (page.status_code, "step 3 of 3" in page.text) == (200, True)
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        addresses = set(re.findall(r'(?:href|src|action)="([^"#?]+)', page.text))
        assert len(addresses) > 10
        for found in addresses:
            assert found.startswith("/console/run/"), found
            assert http.get(f"{judge.url}{found}").status_code == 200, found
        stamp = page.headers["etag"]
        assert http.get(f"{base}/", headers={"If-None-Match": stamp}).status_code == 304
        evaluated.metrics.append({"step": 4, "reward/mean": 0.5})
        again = http.get(f"{base}/", headers={"If-None-Match": stamp})
        assert (again.status_code, '<a href="/console/run/step/4">4</a>' in again.text) == (
            200,
            True,
        )
        judge.ready(2)
        (second,) = [
            subprocess.run(**command(judge, evaluated.path), capture_output=True, timeout=120)
        ]
        assert (second.returncode, "console-run in this cluster already" in second.stderr) == (
            2,
            True,
        ), second.stderr
    judge.ready(2)
    with httpx.Client(trust_env=False) as http:
        assert http.get(f"{base}/").status_code != 200, "it has ended; the judge goes on"


def test_without_a_token_there_must_be_loopback_and_a_run(
    judge: Served, evaluated: RunFolder, tmp_path: Path
) -> None:
    with console(judge, evaluated, "--insecure") as address, httpx.Client(trust_env=False) as http:
        assert "token" not in address
        assert http.get(f"{address}step/1").status_code == 200
        picture = re.search(
            r'<image [^>]*href="(/console/run/picture/[^"]+)"',
            http.get(f"{address}step/1/group/1").text,
        )
        assert picture
        assert http.get(f"{judge.url}{picture[1]}").headers["content-type"].startswith("image/")
    for words, why in (
        ((tmp_path,), "holds no run"),
        (
            (evaluated.path, "--insecure", "--host", "0.0.0.0"),
            "without a token only loopback is served",
        ),
        ((evaluated.path, "--host", "0.0.0.0"), "--host, --port"),
        ((evaluated.path, "--port", "70000"), "port: "),
        ((evaluated.path, "--address", "127.0.0.1:9"), "no Ray cluster answers at 127.0.0.1:9"),
    ):
        done = subprocess.run(**command(judge, *words), capture_output=True, timeout=120)
        assert (done.returncode, why in done.stderr) == (2, True), done.stderr


def test_the_page_of_the_judge_shows_what_a_real_one_says(
    judge: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path, "run").acquired() as live:
        monkeypatch.setattr(
            "rayloop.serve_apps.console.content.own_copy", lambda cluster: live.config
        )  # a run of this user
        settings = {"judge": {"url": judge.url, "key_file": str(judge.key_file)}}
        live.write_config(
            yaml.safe_dump(
                {
                    "reward": {
                        "source": {"use": "rayloop.judge.reward:JudgeReward", "with": settings}
                    }
                }
            )
        )
        judge.ready(2)
        with TestClient(web(live, ""), "http://127.0.0.1:8000") as client:
            page = client.get("/judge").text
    for said in (
        "ready",
        "openai stub",
        "Verdicts that were known.",
        "1: the last canary was judged right, in time.",
    ):
        assert said in page
    assert judge.key_file.read_text(encoding="utf-8").strip() not in page
