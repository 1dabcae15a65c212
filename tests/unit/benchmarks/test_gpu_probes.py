"""What the probes for a GPU share: nothing that they started outlives its limit, and what they
found is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import children
from benchmarks.gpu.__main__ import PROBES, Probe, main
from benchmarks.gpu.children import completed
from benchmarks.gpu.result import Found, Place, measured, record
from tests.support.runs import eventually

HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
below = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
orphan = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid)"
below += [subprocess.run([sys.executable, "-c", orphan, *sleep], stdout=subprocess.PIPE, text=True).stdout.strip()]
with open(sys.argv[1] + ".part", "w") as file:
    print(os.getpid(), *(getattr(one, "pid", one) for one in below), file=file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def living(pids: list[int]) -> list[int]:
    return [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"
    ]


def test_a_process_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child, one in a session of its own, one whose parent has gone, and a process that ignores
    SIGTERM.
    """
    monkeypatch.setattr(children, "GRACE_S", 0.3)
    reported = tmp_path / "pids"
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, str(reported)], start_new_session=True
    ) as process:
        try:
            eventually(reported.exists, "all are there", 60)
        finally:
            children.end_all(process.pid)
    pids = [int(pid) for pid in reported.read_text(encoding="utf-8").split()]
    assert len(pids) == 4
    assert living(pids) == []


def test_what_is_too_slow_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, end_all = list[int](), children.end_all

    def noted(pid: int) -> None:
        ended.append(pid)
        end_all(pid)

    monkeypatch.setattr(children, "end_all", noted)
    with pytest.raises(subprocess.TimeoutExpired):
        completed([sys.executable, "-c", "import time; time.sleep(600)"], 0.2)
    assert len(ended) == 1
    assert living(ended) == []


def test_what_ends_in_time_is_as_from_subprocess() -> None:
    done = completed(
        [sys.executable, "-c", "print(3); raise SystemExit(4)"],
        60.0,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout) == (4, "3\n")


def finds(place: Place) -> Found:
    yield "figure", 1


def fails(place: Place) -> Found:
    yield "one", {"error": "no"}
    yield "other", {"error": "neither"}


def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"{__name__}"
    monkeypatch.setattr(
        command, "PROBES", {"finds": Probe(f"{here}:finds"), "fails": Probe(f"{here}:fails")}
    )


def test_a_probe_alone_prints_what_it_found_as_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probes(monkeypatch)
    for name, code in (("finds", 0), ("fails", 1)):
        assert (
            main([name, "--tiny", "--out", str(tmp_path / "gpu.json"), "--models", str(tmp_path)])
            == code
        )
        (line,) = capsys.readouterr().out.splitlines()
        assert list(json.loads(line)["probes"]) == [name]
    kept = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["probes"]
    assert {name: probe["status"] for name, probe in kept.items()} == {
        "finds": "measured",
        "fails": "failed",
    }


def test_one_that_is_too_slow_does_not_hold_up_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(line: list[str], limit: float, **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(line[3])
        if line[3] == "start":
            raise subprocess.TimeoutExpired(line, limit)
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(command, "completed", run)
    (tmp_path / "gpu.json").write_text(json.dumps({"format": 1, "probes": {}}), encoding="utf-8")
    assert main(["all", "--out", str(tmp_path / "gpu.json")]) == 1
    assert asked == list(PROBES)
    assert "start: ended after 1200 s" in capsys.readouterr().err


def test_all_goes_on_where_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is tried again, and everything with other sizes."""
    probes(monkeypatch)
    file, place = tmp_path / "gpu.json", Place(tmp_path, tiny=True)
    assert record(file, "finds", finds, place)
    assert not record(file, "fails", fails, place)
    assert measured(file, tiny=True) == {"finds"}
    assert measured(file, tiny=False) == set()
    assert measured(tmp_path / "none.json", tiny=True) == set()
    began = list[list[str]]()

    def noted(command: list[str], *_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        began.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(command, "completed", noted)
    assert main(["all", "--tiny", "--out", str(file), "--models", str(tmp_path)]) == 1
    assert [words[3] for words in began] == ["fails"]
    assert "finds: measured before" in capsys.readouterr().err
