"""``slurm``: what would be submitted, and its life on a Slurm of shell scripts (``make test-slurm`` has a real one)."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.cli import main
from rayloop.config.settings import load
from rayloop.launch import slurm_job
from rayloop.launch.rendezvous import Head, Rendezvous
from rayloop.launch.slurm import SCRIPTS, SITE, SiteSettings, plan

FAKE = {
    "sbatch": """echo "$@" >> $HERE/submitted; n=$(wc -l < $HERE/submitted); echo $n >> $HERE/active; echo "$n;cluster" """,
    "squeue": """[ -s $HERE/active ] && sed 's/.*/& & RUNNING & name RUNNING 0:01 node/' $HERE/active; exit 0""",
    "scancel": """echo "$@" >> $HERE/cancelled; [ "$1" = --batch ] && sed -i "/$3/d" $HERE/active || : > $HERE/active""",
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the commands of a Slurm that accepts everything, and the site's file."""
    for name, body in FAKE.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nHERE={tmp_path}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = {
        "cluster": "mine",
        "rendezvous": str(tmp_path / "shared"),
        "logs": str(tmp_path / "logs"),
        "worker": {"count": 3},
    }
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    return tmp_path


def slurm(fake: Path, *arguments: str) -> int:
    return main(["slurm", arguments[0], "--site", str(fake / "site.yaml"), *arguments[1:]])


def test_the_shipped_site_is_valid_and_its_scripts_exist() -> None:
    site = load(SITE, [], SiteSettings)
    for together in (False, True):
        for job in plan(site, ["run.yaml"], together=together):
            assert Path(job.arguments[0]).is_file()
            assert job.arguments[1] == "rayloop"


def test_jobs_of_a_cluster() -> None:
    site = SiteSettings(
        cluster="mine", sbatch=("--account=a",), worker={"count": 3, "gres": "gpu:8", "node": ["--resource=r=1"]}
    )
    head, worker, train = plan(site, ["run.yaml", "steps=3"], together=False)
    assert not [option for option in head.command("17") if option.startswith("--dependency")]
    assert {"--array=1-3", "--gres=gpu:8", "--account=a", "--dependency=after:17"} <= set(worker.command("17"))
    assert worker.arguments[1:] == ("mine", "--resource=r=1")
    assert train.arguments[1:] == ("mine", "run.yaml", "steps=3")
    assert len(plan(site, [], together=False)) == 2, "without a run, nothing trains"

    (one,) = plan(site, ["run.yaml"], together=True)
    first, second = shlex.join(one.command("")).split(" : ")
    assert "--gres" not in first
    assert "RAYLOOP_WORKER_OPTIONS=--resource=r=1" in first
    assert "--nodes=3" in second
    assert "--account=a" in second


def test_render_prints_a_script_that_submits_the_same(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm(fake, "render") == 0
    subprocess.run(["bash", "-eu", "-c", capsys.readouterr().out], check=True)
    rendered = (fake / "submitted").read_text()
    (fake / "submitted").unlink()
    assert slurm(fake, "up") == 0
    assert (fake / "submitted").read_text() == rendered.replace("after:1;cluster", "after:1")


def test_up_status_down(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm(fake, "up") == 0
    place = Rendezvous(fake / "shared", "mine")
    assert place.jobs() == ["1", "2"]
    assert slurm(fake, "status") == 1, "no head yet"
    assert "head: none" in capsys.readouterr().out
    place.publish(Head("127.0.0.1:1", "http://127.0.0.1:2", None, "node", "1", 0, 0.0))
    assert slurm(fake, "status") == 1
    assert "head: stale, 127.0.0.1:1 accepts no connection" in capsys.readouterr().out
    place.register("9", program=True)
    with (fake / "active").open("a") as file:
        file.write("9\n")
    assert slurm(fake, "down") == 0
    assert (fake / "cancelled").read_text().splitlines() == ["--batch --signal=INT 9", "1 2"], (
        "who may save comes first"
    )
    assert not place.folder.exists()
    assert slurm(fake, "down") == 0, "nothing is there, and that is what was asked for"


def test_what_cannot_work_is_refused_before_anything_is_submitted(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slurm(fake, "up", "--together") == 2
    assert slurm(fake, "up", "--set", "worker.count=0") == 2
    assert slurm(fake, "up", str(SCRIPTS / "site.yaml")) == 2, "not the configuration of a run"
    assert not (fake / "submitted").exists()
    (fake / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2; exit 1")
    assert slurm(fake, "up") == 1
    assert "invalid partition" in capsys.readouterr().err


def test_without_slurm_its_commands_are_missed(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm(fake, "up") == 1
    assert "sbatch: no such command" in capsys.readouterr().err
    assert not slurm_job.ended("1"), "it cannot be told"


def test_a_node_knows_its_job(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    assert (slurm_job.job(), slurm_job.cpus(), slurm_job.gpus()) == (None, None, None)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "16")
    assert (slurm_job.job(), slurm_job.cpus(), slurm_job.gpus()) == ("5", 16, 0)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu1")
    (fake / "scontrol").write_text("#!/bin/bash\necho NodeName=gpu1 NodeAddr=127.0.0.9 NodeHostName=gpu1")
    (fake / "scontrol").chmod(0o755)
    assert slurm_job.node_address() == "127.0.0.9"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.stem)
def test_scripts_are_thin_and_hold_no_address(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) < 12
    assert "-m cluster node" in script.read_text()
