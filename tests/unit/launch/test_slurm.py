"""``slurm``: what would be submitted, and its life on a Slurm of shell scripts (``make test-slurm``
has a real one).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rayloop.cli import main, parsed
from rayloop.config.settings import load
from rayloop.core.failures import ConfigError
from rayloop.launch import fixed_size, slurm_job
from rayloop.launch.ray_variables import SUBREAPER, node_settings
from rayloop.launch.rendezvous import Head, Rendezvous
from rayloop.launch.slurm import SCRIPTS, SITE, SiteSettings, plan
from tests.support.runs import ROOT, eventually

FAKE = {
    "sbatch": (
        """echo "$@" >> $HERE/submitted; n=$(wc -l < $HERE/submitted); echo $n >> $HERE/active; echo "$n;cluster" """
    ),
    "squeue": (
        """[ -s $HERE/active ] && sed 's/.*/& & RUNNING & name RUNNING 0:01 node/' $HERE/active; exit 0"""
    ),
    "scancel": (
        """echo "$@" >> $HERE/cancelled; [ "$1" = --batch ] && sed -i "/$3/d" $HERE/active || : > $HERE/active"""
    ),
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the commands of a Slurm that accepts everything, and the site's file."""
    for name, body in FAKE.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nHERE={tmp_path}\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = {
        "cluster": "mine",
        "rendezvous": str(tmp_path / "shared"),
        "logs": str(tmp_path / "logs"),
        "worker": {"count": 3},
    }
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site), encoding="utf-8")
    return tmp_path


def slurm(fake: Path, *arguments: str) -> int:
    return main(["slurm", arguments[0], "--site", str(fake / "site.yaml"), *arguments[1:]])


def test_the_shipped_site_is_valid_and_its_scripts_exist() -> None:
    site = load(SITE, [], SiteSettings)
    for job in plan(site, ["run.yaml"]):
        assert Path(job.arguments[0]).is_file()
        assert job.arguments[1] == "rayloop"


def test_jobs_of_a_cluster() -> None:
    site = SiteSettings(
        cluster="mine",
        sbatch=("--account=a",),
        worker={"count": 3, "gres": "gpu:8", "node": ["--resource=r=1"]},
    )
    head, worker, train = plan(site, ["run.yaml", "steps=3"])
    assert not [option for option in head.command("17") if option.startswith("--dependency")]
    assert {"--array=1-3", "--gres=gpu:8", "--account=a", "--dependency=after:17"} <= set(
        worker.command("17")
    )
    assert worker.arguments[1:] == ("mine", "--resource=r=1")
    assert train.arguments[1:] == ("mine", "run.yaml", "steps=3")
    assert len(plan(site, [])) == 2, "without a run, nothing trains"


def test_render_prints_a_script_that_submits_the_same(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slurm(fake, "render") == 0
    subprocess.run(["bash", "-eu", "-c", capsys.readouterr().out], check=True)
    rendered = (fake / "submitted").read_text(encoding="utf-8")
    (fake / "submitted").unlink()
    assert slurm(fake, "up") == 0
    assert (fake / "submitted").read_text(encoding="utf-8") == rendered.replace(
        "after:1;cluster", "after:1"
    )


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
    with (fake / "active").open("a", encoding="utf-8") as file:
        file.write("9\n")
    assert slurm(fake, "down") == 0
    assert (fake / "cancelled").read_text(encoding="utf-8").splitlines() == [
        "--batch --signal=INT 9",
        "1 2",
    ], "who may save comes first"
    assert not place.folder.exists()
    assert slurm(fake, "down") == 0, "nothing is there, and that is what was asked for"


def test_what_cannot_work_is_refused_before_anything_is_submitted(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert slurm(fake, "up", "--set", "worker.count=0") == 2
    assert slurm(fake, "up", str(SCRIPTS / "site.yaml")) == 2, "not the configuration of a run"
    assert not (fake / "submitted").exists()
    (fake / "sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: invalid partition' >&2; exit 1", encoding="utf-8"
    )
    assert slurm(fake, "up") == 1
    assert "invalid partition" in capsys.readouterr().err


def test_without_slurm_its_commands_are_missed(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm(fake, "up") == 1
    assert "sbatch: no such command" in capsys.readouterr().err
    assert not slurm_job.ended("1"), "it is unknown"


def test_a_node_knows_its_job(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    assert (slurm_job.job(), slurm_job.cpus(), slurm_job.gpus()) == (None, None, None)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "16")
    assert (slurm_job.job(), slurm_job.cpus(), slurm_job.gpus()) == ("5", 16, 0)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu1")
    knows(fake, "10.1.2.3")
    assert slurm_job.node_address() == "10.1.2.3"


def knows(fake: Path, address: str) -> None:
    """Slurm's word for where this node is."""
    (fake / "scontrol").write_text(
        f"#!/bin/bash\necho NodeName=gpu1 NodeAddr={address} NodeHostName=gpu1", encoding="utf-8"
    )
    (fake / "scontrol").chmod(0o755)


@pytest.fixture
def outward(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the route to the outside."""
    monkeypatch.setattr(slurm_job, "this_node", lambda: "10.9.9.9")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu1")
    return "10.9.9.9"


@pytest.mark.parametrize("named", ["127.0.1.1", "127.0.0.1", "localhost"])
def test_an_address_that_others_cannot_reach_is_not_published(
    fake: Path, outward: str, named: str
) -> None:
    knows(fake, named)
    assert slurm_job.node_address() == outward


def test_a_name_that_only_the_controller_knows_is_not_published(
    fake: Path, outward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        raise OSError(f"{name}: Name or service not known")

    knows(fake, "gpu1-ib")
    monkeypatch.setattr("socket.gethostbyname", unknown)
    assert slurm_job.node_address() == outward


def test_without_scontrol_the_route_tells_the_address(
    monkeypatch: pytest.MonkeyPatch, outward: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert slurm_job.node_address() == outward


def test_an_interface_is_chosen_by_name(fake: Path, outward: str) -> None:
    knows(fake, "10.1.2.3")
    assert slurm_job.node_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"--interface ib7: this node has none.*lo \(127.0.0.1\)"):
        slurm_job.node_address("ib7")


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_JOB_GPUS": "0,1"}, 2),
        ({"SLURM_JOB_GPUS": "0-3,6"}, 5),
        ({"SLURM_STEP_GPUS": "2", "SLURM_JOB_GPUS": "0-3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5f2c9d0e,GPU-81aa7c"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0"}, 4),
        ({}, 0),
    ],
)
def test_gpus_are_counted_where_slurm_only_lists_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], gpus: int
) -> None:
    for name in ("SLURM_GPUS_ON_NODE", *slurm_job.GPU_LISTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert slurm_job.gpus() == gpus


def test_a_job_that_cannot_requeue_itself_says_so_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    seen: list[int] = []
    words = [
        "node",
        "worker",
        "--cluster",
        "c",
        "--rendezvous",
        str(tmp_path),
        "--requeue",
        "3",
        "--",
        "true",
    ]
    arguments = parsed(words)

    def role(a: argparse.Namespace, *_: Any) -> int:
        seen.append(a.requeue)
        return 0

    arguments.role = role
    assert arguments.run(arguments) == 0
    assert seen == [0]
    text = capsys.readouterr().out
    assert "--requeue does nothing without scontrol" in text
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()
    assert (
        f"open between the nodes: 20000-29999 (Ray), and {low}-{high} (the policy's ranks" in text
    ), "before anything hangs"


def test_a_site_has_a_place_for_modules_a_container_and_a_network(tmp_path: Path) -> None:
    site = SiteSettings(
        setup=str(tmp_path / "setup.sh"), container="apptainer exec --nv image.sif", interface="ib0"
    )
    head = plan(site, [])[0]
    (export,) = (option for option in head.options if option.startswith("--export="))
    assert export.endswith(
        f",RAYLOOP_PYTHON=python,RAYLOOP_SETUP={tmp_path}/setup.sh,"
        "RAYLOOP_CONTAINER=apptainer exec --nv image.sif,RAYLOOP_INTERFACE=ib0"
    )
    with pytest.raises(ValidationError):
        SiteSettings(container="apptainer exec -B /a,/b image.sif")


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.stem)
def test_scripts_read_the_setup_and_run_python_in_the_container(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "setup.sh").write_text("loaded=yes; export loaded", encoding="utf-8")
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 0", encoding="utf-8")
    (tmp_path / "contain").write_text('#!/bin/bash\necho "$loaded $@"', encoding="utf-8")
    for name in ("srun", "contain"):
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RAYLOOP_SETUP": str(tmp_path / "setup.sh"),
        "RAYLOOP_CONTAINER": "contain --nv",
        "RAYLOOP_PYTHON": "python",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_ARRAY_TASK_ID": "0",
    }
    done = subprocess.run(
        ["bash", "-x", str(script), "mine", "run.yaml"],
        env=variables,
        capture_output=True,
        text=True,
    )
    fixed = script.name == "fixed_size.sbatch"
    said = (
        done.stderr if fixed else done.stdout
    )  # of that script the container's output is read by the shell
    starts = {"fixed_size": ".launch.fixed_size", "eval": " eval "}.get(script.stem, " node ")
    assert f"yes --nv python -m rayloop{starts}" in said


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.stem)
def test_scripts_are_thin_and_hold_no_address(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    lines = [
        line
        for line in script.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert len(lines) < (14 if script.name == "fixed_size.sbatch" else 12)
    starts = {"fixed_size": "ray.scripts.scripts symmetric-run", "eval": "-m rayloop eval"}.get(
        script.stem, "-m rayloop node"
    )
    assert starts in script.read_text(encoding="utf-8")


def evaluated(
    folder: Path, number: int, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What element ``number`` of the array runs; ``python`` prints its arguments."""
    (folder / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"', encoding="utf-8")
    (folder / "python").chmod(0o755)
    known = {
        "PATH": "/usr/bin:/bin",
        "RAYLOOP_PYTHON": str(folder / "python"),
        "SLURM_ARRAY_TASK_ID": str(number),
        **variables,
    }
    return subprocess.run(
        ["bash", SCRIPTS / "eval.sbatch", *arguments], env=known, capture_output=True, text=True
    )


def test_an_array_evaluates_a_checkpoint_on_each_chart_benchmark(tmp_path: Path) -> None:
    text = (SCRIPTS / "eval.sbatch").read_text(encoding="utf-8")
    asked = [
        evaluated(
            tmp_path, number, "run.yaml", "runs/mine", "--samples=2", "model.min_pixels=376320"
        ).stdout.splitlines()
        for number in range(6)
    ]
    assert "--array=0-5" in text
    found = [parsed(words[2:]) for words in asked]
    assert all(words[:2] == ["-m", "rayloop"] for words in asked)
    assert sorted(one.benchmark for one in found) == sorted(
        path.stem for path in (ROOT / "recipes/chart_rvr/benchmarks").iterdir()
    )
    assert {
        (str(one.config), str(one.checkpoint), one.samples, *one.overrides) for one in found
    } == {("run.yaml", "runs/mine", 2, "model.min_pixels=376320")}


def test_an_array_of_other_benchmarks_has_an_element_for_each(tmp_path: Path) -> None:
    named = {"RAYLOOP_BENCHMARKS": "screenspot chartqa"}
    assert (
        "--benchmark\nchartqa\n" in evaluated(tmp_path, 1, "run.yaml", "runs/mine", **named).stdout
    )
    beyond = evaluated(tmp_path, 2, "run.yaml", "runs/mine", **named)
    assert beyond.returncode
    assert "no benchmark has the number 2: --array=0-1" in beyond.stderr
    assert (
        "usage: sbatch eval.sbatch CONFIG CHECKPOINT" in evaluated(tmp_path, 0, "run.yaml").stderr
    )


def test_a_fixed_size_job_gets_a_token_and_the_variables_of_our_own_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reads them at its start, and ``ray symmetric-run`` sets none."""
    monkeypatch.setattr(
        slurm_job, "node_address", {None: "10.0.0.1", "ib0": "10.1.0.1"}.__getitem__
    )
    asked = {"SLURM_JOB_ID": "70017", "RAYLOOP_RENDEZVOUS": str(tmp_path)}
    found = fixed_size.variables(asked)
    token = Path(found["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o077 == 0
    assert node_settings(token, runs_jobs=True).items() <= found.items()
    assert found[SUBREAPER] == "false", (
        "else symmetric-run would read the exit code of every run as 0"
    )
    assert found["RAYLOOP_HEAD"] == "10.0.0.1:20017"
    assert "10.0.0.1" in found["NO_PROXY"].split(",")
    assert "NCCL_SOCKET_IFNAME" not in found
    fast = fixed_size.variables(asked | {"RAYLOOP_INTERFACE": "ib0"})
    assert (fast["RAYLOOP_HEAD"], fast["NCCL_SOCKET_IFNAME"]) == ("10.1.0.1:20017", "ib0")
    assert fast["RAY_AUTH_TOKEN_PATH"] == str(token), "a requeued job keeps it"
    token.chmod(0o644)
    with pytest.raises(ConfigError):
        fixed_size.variables(asked)


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


def in_a_job(folder: Path) -> dict[str, str]:
    """The variables of a batch script, whose programs are those of the folder."""
    return {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_JOB_ID": "41",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURM_JOB_NUM_NODES": "2",
        "RAYLOOP_PYTHON": str(folder / "python"),
    }


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(75, 0, True), (75, 19, True), (75, 20, False), (0, 0, False), (1, 0, False)],
)
def test_a_fixed_size_job_is_requeued_when_its_run_has_saved(
    tmp_path: Path, code: int, restarts: int, requeued: bool
) -> None:
    """``srun`` and ``scontrol`` are scripts; of the real ones tests/deploy/slurm has a test."""
    for name, body in {
        "srun": f'echo "$@" >{tmp_path}/srun.txt; exit {code}',
        "scontrol": f'echo "$@" >{tmp_path}/scontrol.txt',
        "python": 'case "$*" in *fixed_size) echo export RAYLOOP_HEAD=10.0.0.1:20017;; esac',
    }.items():
        program(tmp_path / name, body)
    environment = {**in_a_job(tmp_path), "SLURM_RESTART_COUNT": str(restarts)}
    done = subprocess.run(
        ["bash", SCRIPTS / "fixed_size.sbatch", "run.yaml", "steps=3"], env=environment, timeout=30
    )
    assert done.returncode == code
    asked = (tmp_path / "srun.txt").read_text(encoding="utf-8")
    assert "symmetric-run --address 10.0.0.1:20017 --min-nodes 2 --num-cpus=8 -- " in asked
    assert asked.rstrip().endswith("-m rayloop train --address 10.0.0.1:20017 run.yaml steps=3")
    assert (tmp_path / "scontrol.txt").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.txt").read_text(encoding="utf-8") == "requeue 41\n"


RUN = """import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path("running").touch()
time.sleep(60)
"""
"""A run that is asked to save: it ends with 75."""
PYTHON = """case "$*" in
    *fixed_size) echo export RAYLOOP_HEAD=10.0.0.1:20017;;
    *symmetric-run*) while [ "$1" != -- ]; do shift; done; shift; exec "$@";;
    *) exec {python} "$@";;
esac"""
CONTAINER = "unshare --user --map-root-user --pid --fork --mount-proc"


@pytest.mark.parametrize("container", ["", CONTAINER], ids=["host", "container"])
def test_a_warned_job_ends_its_run_however_a_container_numbers_it(
    tmp_path: Path, container: str
) -> None:
    if container and subprocess.run([*container.split(), "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespace for the numbers of processes")
    package = tmp_path / "rayloop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(RUN, encoding="utf-8")
    program(tmp_path / "srun", 'shift; exec "$@"')
    program(tmp_path / "scontrol", f'echo "$@" >{tmp_path}/scontrol.txt')
    program(tmp_path / "python", PYTHON.format(python=sys.executable))

    job = subprocess.Popen(
        ["bash", SCRIPTS / "fixed_size.sbatch", "run.yaml"],
        env={**in_a_job(tmp_path), "RAYLOOP_CONTAINER": container},
        cwd=tmp_path,
    )
    eventually((tmp_path / "running").exists, "the run has begun", 100)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(100) == 75
    assert (tmp_path / "scontrol.txt").read_text(encoding="utf-8") == "requeue 41\n"
