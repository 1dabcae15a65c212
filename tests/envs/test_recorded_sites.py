"""A site of our own that is recorded, and replayed when its server has stopped: redirects, a login by cookie,
scripts, requests with times in their addresses, a clock and random numbers.
"""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayloop.core.failures import ConfigError, EnvironmentFailed
from rayloop.core.protocols import Observation
from rayloop.core.types import ImageSource, Message, Task
from tests.envs.pages import host
from tests.envs.programs import needs

pytest.importorskip("playwright", reason="make test-env installs playwright")

from rayloop.envs.browser import sites
from rayloop.envs.browser.web import WebPage

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]

PATIENT = {"launch_timeout": 120.0, "load_timeout": 60.0, "action_timeout": 60.0}
"""Other tests may run on the same cores."""
SHOP = """<!doctype html><body style="margin:0;font:16px monospace"><script src="/app.js"></script>
<p>page {count} {time}</p><p id=clock></p><p id=dice></p><p id=price></p><img src="/dot.png" width=40 height=40>
<button style="position:absolute;left:0;top:240px;width:300px;height:100px" onclick="go()">{who}</button>"""
APP = """addEventListener('load', async () => {
    clock.textContent = new Date().toString() + ' ' + Date()
    dice.textContent = Math.random() + crypto.randomUUID()
    setInterval(() => dice.title = new Date(), 50)
    for (let again = 0; again < 2; again++)
        price.textContent += await (await fetch('/price?_=' + Date.now())).text() + ' '
    window.ready = true
})
const go = async () => {
    await fetch('/login', {method: 'POST', body: JSON.stringify({name: 'ada', at: Date.now()})})
    location = '/shop'
}"""


class Shop(http.server.BaseHTTPRequestHandler):
    """Each answer differs from the one before it."""

    count = 0

    def do_GET(self) -> None:
        type(self).count += 1
        path = self.path.partition("?")[0]
        cookies = self.headers.get("Cookie", "")
        if path == "/":
            hour = formatdate(__import__("time").time() + 3600, usegmt=True)
            session = [f"session=s{self.count}; Expires={hour}; Path=/", "theme=dark; Path=/"]
            return self.answer(302, "", "text/html", location="/moved", cookies=session)
        if path == "/moved":
            return self.answer(301, "", "text/html", location="/shop")
        if path == "/shop":
            who = "ada" if "user=ada" in cookies else "log in" if "session=s" in cookies else "?"
            text = SHOP.format(count=self.count, time=formatdate(), who=who)
            return self.answer(200, text, "text/html; charset=utf-8")
        if path == "/app.js":
            return self.answer(200, APP, "text/javascript")
        if path == "/price":
            return self.answer(200, f"{self.count} EUR", "text/plain")
        if path == "/dot.png":
            image = io.BytesIO()
            Image.new("RGB", (40, 40), (self.count * 7 % 256, 90, 0)).save(image, "png")
            return self.answer(200, image.getvalue(), "image/png")
        return self.answer(200, "another page", "text/html")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, "", "text/plain", cookies=["user=ada; Path=/; HttpOnly"])

    def answer(
        self, status: int, body: str | bytes, kind: str, *, location: str = "", cookies: Any = ()
    ) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if location:
            self.send_header("Location", location)
        for cookie in cookies:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def shop() -> Iterator[str]:
    Shop.count = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Shop) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def episode(site: str, path: str = "/", **browser: Any) -> Iterator[tuple[WebPage, Observation]]:
    sites.recording.cache_clear()
    environment = WebPage(
        WebPage.Settings.model_validate(
            {
                "sites": [site],
                "width": 640,
                "height": 360,
                "settle": 0.2,
                "browser": {**PATIENT, **browser},
            }
        )
    )
    task = Task(
        "t",
        (Message("user", ("{instruction}",)),),
        extra={"url": f"http://{site}{path}", "check": "window.done === true", "instruction": ""},
    )
    try:
        yield environment, environment.reset(task)
    finally:
        environment.close()


def pixels(observation: Observation | None) -> np.ndarray[Any, Any]:
    assert observation is not None
    [source] = [
        part
        for message in observation.messages
        for part in message.parts
        if isinstance(part, ImageSource)
    ]
    return np.asarray(Image.open(io.BytesIO(source.data or b"")).convert("RGB"))


def evaluated(environment: WebPage, expression: str) -> Any:
    assert environment._tab is not None
    return host(environment).run(environment._tab.evaluate(expression), 10)


WAIT = "Action: wait()"
READY = """new Promise(done => {
    const look = () => window.ready ? done(true) : setTimeout(look, 20)
    look()
})"""
LOG_IN = "Action: click(start_box='(100,290)')"


def visit(site: str, **browser: Any) -> tuple[list[np.ndarray[Any, Any]], list[Any], list[str]]:
    """The screens of an episode, what its pages said, and what the recording lacked."""
    with episode(site, **browser) as (environment, _):
        screens = []
        texts = []
        for action in (WAIT, LOG_IN):
            assert environment.step(action).error is None
            assert evaluated(environment, READY)
            step = environment.step(WAIT)
            screens.append(pixels(step.observation))
            texts.append(evaluated(environment, "[document.body.innerText, document.cookie]"))
        return screens, texts, list(step.info["unrecorded"])


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """The address of a site whose server has stopped, its recording, and what a visit saw."""
    folder = tmp_path_factory.mktemp("recordings") / "shop"
    with shop() as site:
        return site, folder, visit(site, record=str(folder))


def test_a_site_whose_server_has_stopped_is_the_same_page_by_page(
    recording: tuple[str, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    site, folder, (screens, texts, _) = recording
    asked = Shop.count

    def no_network(*_: Any) -> None:
        raise AssertionError("replay asked the network")

    monkeypatch.setattr(sites.Sites, "_fetched", no_network)
    for _ in range(2):
        again, words, missing = visit(site, replay=str(folder))
        assert words == texts
        assert missing == []
        assert [bool((new == old).all()) for new, old in zip(again, screens, strict=True)] == [
            True
        ] * 2
    assert "log in" in texts[0][0]
    assert "theme=dark" in texts[0][1]
    assert "ada" in texts[1][0]
    assert Shop.count == asked


def test_each_answer_is_kept_once_and_no_secret_of_a_request(
    recording: tuple[str, Path, Any],
) -> None:
    _, folder, _ = recording
    entries = recorded(folder)
    paths = [entry["url"].partition("?")[0].rpartition("/")[2] for entry in entries]
    # The page, its script, its picture and two prices, before the login and after it.
    assert sorted(paths) == sorted(
        ["", "moved", "login", *2 * ["shop", "app.js", "dot.png", *2 * ["price"]]]
    )
    bodies = {file.name for file in (folder / "bodies").iterdir()}
    assert bodies == {entry["body"] for entry in entries}
    for file in (folder / "bodies").iterdir():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
    assert b'"name": "ada"' not in (folder / "index.jsonl").read_bytes()


def test_what_was_not_recorded_is_named(recording: tuple[str, Path, Any]) -> None:
    site, folder, _ = recording
    with episode(site, replay=str(folder)) as (environment, _):
        evaluated(environment, "new Image().src = '/new.png'")
        step = environment.step(WAIT)
        assert step.info["unrecorded"] == [f"http://{site}/new.png"]
        assert step.info["refused"] == {"unrecorded": 1}
        refused = environment.step(f"Action: open_url(url='http://{site}/other')")
    assert refused.error


def test_a_policy_that_leaves_the_recording_reads_so_and_goes_on(
    recording: tuple[str, Path, Any],
) -> None:
    """As a failure of the environment it would leave the policy's own episode out."""
    site, folder, _ = recording
    with episode(site, replay=str(folder)) as (environment, _):
        evaluated(environment, "setTimeout(() => location = '/other', 50)")
        left = environment.step(WAIT)
        assert left.error is not None
        assert f"http://{site}/other is not in the recording" in left.error
        assert not left.done
        after = environment.step(WAIT)
        assert after.error is None
        assert evaluated(environment, "location.pathname") == "/shop"


def test_a_task_whose_page_was_not_recorded_fails_by_its_name(
    recording: tuple[str, Path, Any],
) -> None:
    site, folder, _ = recording
    with (
        pytest.raises(EnvironmentFailed, match=f"http://{site}/other is not in the recording"),
        episode(site, "/other", replay=str(folder)),
    ):
        pass


def test_the_clock_rests_and_begins_at_the_recording(recording: tuple[str, Path, Any]) -> None:
    site, folder, _ = recording
    moment = json.loads((folder / "index.jsonl").read_text().splitlines()[0])["moment"]
    with episode(site, replay=str(folder)) as (environment, _):
        second = "Math.floor(Date.now() / 1000)"
        assert evaluated(environment, second) == moment
        environment.step("Action: wait()")
        assert evaluated(environment, second) == moment
        # Scripts that wait by the clock end, and a person's input lets a second pass.
        assert evaluated(
            environment,
            "new Promise(done => { const from = Date.now(); const look = () =>"
            " Date.now() - from >= 0 ? done(new Date() instanceof Date) : setTimeout(look, 5); look() })",
        )
        environment.step("Action: press(key='shift')")
        assert evaluated(environment, second) == moment + 1
        assert (
            evaluated(
                environment, "new Date(5).getTime() + new (new Date().constructor)(7).getTime()"
            )
            == 12
        )


def test_a_changed_body_counts_as_missing(recording: tuple[str, Path, Any], tmp_path: Path) -> None:
    import shutil

    site, folder, _ = recording
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    picture = next(entry for entry in recorded(copy) if entry["url"].endswith("/dot.png"))
    body = copy / "bodies" / picture["body"]
    body.unlink()
    body.symlink_to("/etc/hostname")
    _, _, missing = visit(site, replay=str(copy))
    assert missing == [f"http://{site}/dot.png"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"kind": "rayloop-recording", "version": 9, "moment": 1}', "version"),
        ("not JSON", "a line"),
        ("", "a line"),
    ],
)
def test_a_foreign_index_is_refused_before_the_run(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "index.jsonl").write_text(f"{line}\n")
    assert words in refusal(tmp_path)


def test_a_body_is_never_a_path(recording: tuple[str, Path, Any], tmp_path: Path) -> None:
    _, folder, _ = recording
    header = (folder / "index.jsonl").read_text().splitlines()[0]
    entry = {**recorded(folder)[0], "body": "../../secret"}
    (tmp_path / "index.jsonl").write_text(f"{header}\n{json.dumps(entry)}\n")
    assert "body" in refusal(tmp_path)


def test_a_folder_without_a_recording_is_refused_before_the_run(tmp_path: Path) -> None:
    assert "is not a recording" in refusal(tmp_path)


def refusal(folder: Path) -> str:
    """Why a run that replays the folder does not start."""
    sites.recording.cache_clear()
    settings = WebPage.Settings.model_validate({"browser": {"replay": str(folder)}})
    with pytest.raises(ConfigError) as refused:
        WebPage.preflight(settings)
    return str(refused.value)
