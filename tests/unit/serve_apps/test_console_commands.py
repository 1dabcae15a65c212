"""``console``, ``watch`` and ``compare``: what they print, and what they refuse."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from PIL import Image

from rayloop.cli import main
from rayloop.commands.console import serve_beside
from rayloop.core import events
from rayloop.run.folder import RunFolder
from tests.support.consoles import opened

STEPS = 3


def ended(root: Path, name: str, reward: float) -> RunFolder:
    with RunFolder(root, name).acquired() as run:
        run.write_config(f"steps: {STEPS}\n")
        run.events.emit(events.Evaluated({"val/reward/mean": reward / 2}), 0)
        for step in range(1, STEPS + 1):
            run.metrics.append(
                {"step": step, "reward/mean": reward, "timing_s/step": 2.0, "actor/entropy": None}
            )
        run.events.emit(events.Evaluated({"val/reward/mean": reward}), STEPS)
        run.events.emit(events.FinishedEvent({"issued": 2, "trained": 2}), STEPS)
    return run


def test_runs_are_compared_in_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        str(ended(tmp_path, name, reward).path)
        for name, reward in (("one", 0.25), ("[bold]two", 0.75))
    ]
    assert main(["compare", *folders, "--out", str(tmp_path / "both.png")]) == 0
    rows = {
        line.split("  ")[0].strip(): line.split() for line in capsys.readouterr().out.splitlines()
    }
    assert rows["reward/mean"] == ["reward/mean", "0.25", "0.75"]
    assert rows["val/reward/mean"] == [
        "val/reward/mean",
        "0.125",
        "->",
        "0.25",
        "0.375",
        "->",
        "0.75",
    ]
    assert rows["run"][1:] == ["ended:", "finished", "ended:", "finished"]
    assert "[bold]two" in str(rows)
    assert Image.open(tmp_path / "both.png").size[0] > 500
    assert main(["compare", str(tmp_path / "nowhere")]) == 2


def test_an_ended_run_is_watched_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(ended(tmp_path, "run", 0.25).path)]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/3  reward 0.250")
    assert last == "ended: finished"


def test_steps_of_a_live_run_are_shown_as_they_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path, "run", 0.25)
    with run.acquired():
        watching = threading.Thread(target=main, args=(["watch", str(run.path)],), daemon=True)
        watching.start()
        deadline, said = time.monotonic() + 30, ""
        while "step 3/3" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().out
            time.sleep(0.05)
        assert watching.is_alive()
        run.metrics.append({"step": 4, "reward/mean": 0.5})
        while "step 4/3  reward 0.500" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().out
            time.sleep(0.05)
    watching.join(30)
    assert (watching.is_alive(), said.count("step 3/3"), said.count("step 4/3")) == (False, 1, 1)


def test_a_console_without_a_token_is_for_loopback_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended(tmp_path, "run", 0.25)
    assert main(["console", str(run.path), "--insecure", "--host", "0.0.0.0"]) == 2
    assert "without a token only loopback is served" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["console", str(run.path), "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in capsys.readouterr().err
    assert main(["console", str(run.path), "--port", "99999"]) == 2
    assert main(["console", str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_the_console_beside_a_run_has_an_address_at_once_and_pages_once_it_has_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_beside(RunFolder(tmp_path, "run"))
    address = opened(capsys.readouterr().out)
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(address, timeout=0.5)
    ended(tmp_path, "run", 0.25)
    with httpx.Client(timeout=30, follow_redirects=True) as browser:
        assert "0.25" in browser.get(address).text
    assert httpx.get(address.partition("?")[0], timeout=30).status_code == 401
