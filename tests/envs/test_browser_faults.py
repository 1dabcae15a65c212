"""What a page, a browser or a driver may do wrong: whose fault it is, and that the next episode is
played.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayloop.core.failures import DataFailure, EnvironmentFailed, ToolDeadline
from rayloop.envs.browser import containment, processes
from tests.envs.pages import CLICK, button, host, visiting, write
from tests.envs.programs import needs
from tests.support.runs import eventually

pytest.importorskip("playwright", reason="make test-env installs playwright")

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]

QUICK = {"action_timeout": 4, "page_memory": 300, "load_timeout": 5}
WAIT = "Action: wait()"
GROWS = (
    "window.kept = []; setInterval(() => { const more = new Uint8Array(5e7); more.fill(1);"
    " kept.push(more) }, 10)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = (
        "const a = document.createElement('a'); a.href = 'data:application/octet-stream,x';"
        " a.download = 'x'; a.click();"
    )
    return write(
        tmp_path_factory.mktemp("pages"),
        good=button("window.done = true"),
        hangs=button("while (true) {}"),
        grows=button(GROWS),
        hangs_at_once="<script>while (true) {}</script>",
        dialogs=button("alert('a'); window.done = confirm('b') === false && prompt('c') === null"),
        windows=button(
            "window.open('http://pages/good.html'); window.open('about:blank'); window.done = true"
        ),
        download=button(save + " window.done = true"),
        local=button("location = 'file:///etc/passwd'; setTimeout(() => window.done = true)"),
        leaves=button("location = 'http://198.51.100.1/'"),
        fetches=button("fetch('http://198.51.100.1/').catch(() => window.done = true)"),
        socket=button("new WebSocket('ws://127.0.0.1:9/').onerror = () => window.done = true"),
    )


def renderers(root: int) -> list[int]:
    return list(filter(processes.renders, processes.tree(root)))


def plays_on(folder: Path) -> None:
    """The next episode is played as if nothing had been."""
    with visiting(folder, "good.html", browser=QUICK) as (environment, _):
        assert environment.step(CLICK).done
        assert environment.evaluate() == 1


def test_a_hang_that_the_policy_caused_is_its_own_and_hurts_no_other_episode(folder: Path) -> None:
    with visiting(folder, "good.html", browser=QUICK) as (other, _):
        with visiting(folder, "hangs.html", browser=QUICK) as (environment, _):
            browser = environment._tab and environment._tab.chromium
            with pytest.raises(ToolDeadline, match="does not answer"):
                environment.step(CLICK)
        assert other.step(CLICK).done
        assert other.evaluate() == 1
        assert other._tab is not None
        assert other._tab.chromium is browser
        assert not browser.retired
    plays_on(folder)


def test_a_page_that_hangs_before_the_policy_acts_is_no_doing_of_its_own(folder: Path) -> None:
    with pytest.raises(EnvironmentFailed), visiting(folder, "hangs_at_once.html", browser=QUICK):
        pass
    plays_on(folder)


def test_a_page_that_eats_memory_is_ended_for_it(folder: Path) -> None:
    with visiting(folder, "grows.html", browser=QUICK) as (environment, _):
        assert environment._tab is not None
        root = environment._tab.chromium.pid
        assert root is not None
        environment.step(CLICK)
        largest, raised = 0, ""
        for _ in range(20):
            largest = max(largest, *map(processes.filled, processes.tree(root)))
            try:
                environment.step(WAIT)
            except ToolDeadline as error:
                raised = str(error)
                break
        assert "300 MiB" in raised
        assert largest < 900 << 20
    plays_on(folder)


@pytest.mark.parametrize(
    ("page", "refused"),
    [
        ("dialogs", {"dialog": 3}),
        ("windows", {"window": 2}),
        ("download", {"download": 1}),
        ("local", {"file": 1}),
        ("fetches", {"network": 1}),
        ("socket", {}),
    ],
)
def test_what_a_page_must_not_do_is_refused_and_counted(
    folder: Path, page: str, refused: dict[str, int]
) -> None:
    with visiting(folder, f"{page}.html", browser=QUICK) as (environment, _):
        result = environment.step(CLICK)
        if not result.done:
            result = environment.step(WAIT)
        assert result.done
        assert environment.evaluate() == 1
        tab = environment._tab
        assert tab is not None
        eventually(lambda: tab.refused == refused, f"{tab.refused} is {refused}", 10)


def test_a_page_that_leaves_for_the_network_arrives_nowhere(folder: Path) -> None:
    with visiting(folder, "leaves.html", browser=QUICK) as (environment, _):
        result = environment.step(CLICK)
        assert not result.done
        assert result.info["refused"] == {"network": 1}
        assert environment.evaluate() == 0


def test_a_page_reaches_no_udp_port_where_the_browser_has_the_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WebRTC asks a STUN server over UDP, which no interception of requests sees."""
    unconfined = containment.Confinement("none", own=False, lacks="made for this test")
    monkeypatch.setattr(containment, "available", lambda: unconfined)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(3.0)
        port = server.getsockname()[1]
        asks = (
            f"const peer = new RTCPeerConnection({{iceServers: [{{urls: 'stun:127.0.0.1:{port}'}}]}});"
            " peer.createDataChannel('x');"
            " peer.createOffer().then(offer => peer.setLocalDescription(offer))"
            ".then(() => window.done = true)"
        )
        write(folder, asks=button(asks))
        open_browser = {**QUICK, "containment": "none"}
        with visiting(folder, "asks.html", browser=open_browser) as (environment, _):
            browsers = host(environment)
            assert environment.step(CLICK).done
            with pytest.raises(TimeoutError):
                server.recvfrom(100)
        browsers.end()


def test_files_of_this_machine_are_not_there(folder: Path, tmp_path: Path) -> None:
    """Not even for Chromium itself: the browser sees another root."""
    with visiting(folder, "good.html", browser=QUICK) as (environment, _):
        assert environment._tab is not None
        root = environment._tab.chromium.pid
        assert root is not None
        [*_, last] = renderers(root)
        assert not any(
            os.path.exists(f"/proc/{pid}/root{tmp_path}") for pid in processes.tree(root)[2:]
        )
        assert os.stat(f"/proc/{last}").st_uid != 0
        for name in ("net", "pid", "mnt", "ipc"):
            assert os.readlink(f"/proc/{last}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")


@pytest.mark.parametrize("who", ["browser", "renderer", "driver"])
def test_what_is_killed_is_a_failure_of_the_environment_and_comes_back(
    folder: Path, who: str
) -> None:
    with visiting(folder, "good.html", browser=QUICK) as (environment, _):
        assert environment._tab is not None
        root = environment._tab.chromium.pid
        assert root is not None
        driver = next(
            p for p in processes.tree(os.getpid()) if "run-driver" in processes.command_line(p)
        )
        victims = {"browser": [root], "renderer": renderers(root), "driver": [driver]}[who]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailed):
            environment.step(CLICK)
    plays_on(folder)


def test_a_browser_that_hangs_is_ended(folder: Path) -> None:
    """Stopped, it neither answers nor closes its pipes."""
    with visiting(folder, "good.html", browser=QUICK) as (environment, _):
        assert environment._tab is not None
        root = environment._tab.chromium.pid
        assert root is not None
        pids = processes.tree(root)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EnvironmentFailed, match="was ended"):
            environment.step(CLICK)
        eventually(lambda: not any(map(processes.command_line, pids)), "it is gone", 10)
    plays_on(folder)


def test_a_browser_is_recycled_after_its_episodes_and_ends_when_its_last_does(folder: Path) -> None:
    often = {**QUICK, "recycle_episodes": 2}
    with visiting(folder, "good.html", browser=often) as (first, _):
        with (
            visiting(folder, "good.html", browser=often),
            visiting(folder, "good.html", browser=often) as (third, _),
        ):
            assert first._tab is not None
            assert third._tab is not None
            assert first._tab.chromium is not third._tab.chromium
            assert first._tab.chromium.retired
        assert first.step(CLICK).done
        assert len(host(first).browsers) == 2
    assert len(host(first).browsers) == 1


def test_a_full_browser_has_another_one_beside_it(folder: Path) -> None:
    one = {**QUICK, "pages": 1}
    with (
        visiting(folder, "good.html", browser=one) as (a, _),
        visiting(folder, "good.html", browser=one) as (b, _),
    ):
        assert a._tab is not None
        assert b._tab is not None
        assert a._tab.chromium is not b._tab.chromium
        assert b.step(CLICK).done


def test_a_row_that_cannot_be_played_is_a_failure_of_the_data(folder: Path) -> None:
    for url, check in [
        ("missing.html", "true"),
        ("file:///etc/passwd", "true"),
        ("http://198.51.100.1/", "true"),
        ("../../etc/passwd", "true"),
        ("good.html", "no.such.thing"),
        ("good.html", "'text'"),
        ("good.html", "syntax error"),
        ("good.html", ""),
    ]:
        with pytest.raises(DataFailure), visiting(folder, url, check, browser=QUICK):
            pass


ACTOR = """
import sys, time
from pathlib import Path
from tests.envs.pages import visiting
with visiting(Path(sys.argv[1]), "good.html"):
    print("playing", flush=True)
    time.sleep(60)
"""


def test_nothing_is_left_when_the_actor_is_killed(folder: Path, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR, str(folder)], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert actor.stdout is not None
        assert actor.stdout.readline() == b"playing\n"
        pids = processes.tree(actor.pid)
        assert any(map(processes.renders, pids))
    finally:
        actor.kill()
        actor.wait()
    eventually(lambda: not any(map(processes.command_line, pids)), "its processes are gone", 10)
    eventually(lambda: not list(tmp_path.iterdir()), "its folders are gone", 10)


def test_a_browser_that_does_not_start_says_so(folder: Path) -> None:
    with (
        pytest.raises(EnvironmentFailed, match="not a program here"),
        visiting(folder, "good.html", browser={"program": "nope"}),
    ):
        pass
    began = time.monotonic()
    broken = {"program": "true", "launch_timeout": 3}
    with (
        pytest.raises(EnvironmentFailed, match="did not start"),
        visiting(folder, "good.html", browser=broken),
    ):
        pass
    assert time.monotonic() - began < 20
