"""``submit``: what is packed, and real jobs on a real head that does not have this checkout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rayloop.cli import main
from rayloop.commands.submit import job_command, pack
from rayloop.core.failures import ConfigError
from rayloop.launch.ray_variables import authentication, joined_cluster, without_proxy
from rayloop.run.config import read
from rayloop.run.preflight import preflight, prepare
from tests.support.heads import Head, checkout, cluster_command, head
from tests.support.runs import ROOT, eventually, settings, tagged


def files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")


def packed(folder: Path) -> set[str]:
    return set(zipfile.ZipFile(pack(folder, folder.parent / "package.zip")).namelist())


def test_a_package_holds_code_and_no_data(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    files(
        folder,
        "a/b.py",
        "c.yaml",
        "runs/x/metrics.jsonl",
        "a/checkpoints/w",
        ".venv/x.py",
        ".env",
        "a/__pycache__/b.pyc",
    )
    assert packed(folder) == {"a/b.py", "c.yaml"}

    files(folder, "ignored.bin", "new.py")
    (folder / ".gitignore").write_text("*.bin\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "add", "c.yaml"], check=True)
    assert packed(folder) == {
        "a/b.py",
        "c.yaml",
        "new.py",
    }, "what git does not ignore, whether it is tracked or not"


@pytest.mark.parametrize("versioned", [True, False])
def test_keys_and_what_links_lead_to_elsewhere_stay_here(
    versioned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outside = tmp_path / "checkout", tmp_path / "home"
    for name in ("checkout/runs", "checkout/code", "home"):
        (tmp_path / name).mkdir(parents=True)
    if versioned:
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for file in (
        folder / "judge.key",
        folder / "code/server.pem",
        folder / "code/a.py",
        outside / "id_secret",
        outside / "b.py",
    ):
        file.write_text("text", encoding="utf-8")
    (folder / "id").symlink_to(outside / "id_secret")
    (folder / "b.py").symlink_to("../home/b.py")
    (folder / "elsewhere").symlink_to(outside)
    (folder / "c.py").symlink_to("code/a.py")
    with zipfile.ZipFile(pack(folder, tmp_path / "package.zip")) as package:
        assert sorted(package.namelist()) == ["c.py", "code/a.py"]
    assert "judge.key" in capsys.readouterr().out


@pytest.mark.parametrize("versioned", [True, False])
def test_what_the_package_finds_beside_itself_is_sent_once(versioned: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    files(folder, "shared/rows.jsonl")
    for name in ("actors/__init__.py", "recipes/mine.py", "rayloop/cli.py"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    shutil.copy(ROOT / "rayloop/__init__.py", folder / "rayloop/__init__.py")
    for name in ("actors", "recipes"):
        (folder / "rayloop" / name).symlink_to(f"../{name}")
    (folder / "data").symlink_to("shared")
    if versioned:
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        subprocess.run(["git", "-C", str(folder), "add", "."], check=True)
    code = {"actors/__init__.py", "recipes/mine.py", "rayloop/__init__.py", "rayloop/cli.py"}
    assert packed(folder) == {*code, "shared/rows.jsonl", "data/rows.jsonl"}
    with zipfile.ZipFile(tmp_path / "package.zip") as archive:
        archive.extractall(tmp_path / "job")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "job")}
    subprocess.run(
        [sys.executable, "-c", "import rayloop.actors, rayloop.recipes.mine"],
        env=variables,
        cwd=tmp_path,
        check=True,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of this repository."""
    folder = tmp_path / "clone"
    command = ["git", "clone", "-q", "--depth=1", f"file://{ROOT}", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this is not a checkout of git")
    return folder


def test_the_repository_is_sent_without_weights_and_small(clone: Path) -> None:
    package = pack(clone, clone.parent / "package.zip")
    names = zipfile.ZipFile(package).namelist()
    assert package.stat().st_size <= 4 * 2**20
    assert not [name for name in names if name.endswith((".safetensors", ".parquet"))]
    assert not [name for name in names if name.startswith("rayloop/recipes/")]
    assert {"rayloop/cli.py", "actors/policy.py", "recipes/arpo/tiny/config.json"} <= {*names}


def test_a_job_has_the_weights_and_the_rows_of_its_own_configuration(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client stands for a head: it unpacks the package."""
    job = clone.parent / "job"

    class Client:
        def __init__(self, address: str) -> None: ...

        def submit_job(self, entrypoint: str, runtime_env: dict[str, str]) -> str:
            zipfile.ZipFile(runtime_env["working_dir"]).extractall(job)
            return "raysubmit_1"

    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", Client)
    monkeypatch.chdir(clone)
    recipe = "recipes/arc_vision"
    configuration = f"{recipe}/quickstart.yaml"
    overrides = ["output=/shared/runs", f"data.eval=./{recipe}/pages/val.parquet"]
    address = ["--address", "http://127.0.0.1:1", "--insecure"]
    assert main(["submit", configuration, *overrides, *address]) == 0

    said = capsys.readouterr().out
    weights = {path.parent for path in job.rglob("*.safetensors")}
    rows = {path.name for path in job.rglob("*.parquet")}
    assert (
        f"MiB; weights and rows: {recipe}/loose, {recipe}/pages/train.parquet, ./{recipe}" in said
    )
    assert "weights and rows that the configuration does not name" in said
    assert weights == {job / recipe / "loose"}
    assert rows == {"train.parquet", "val.parquet"}
    monkeypatch.chdir(job)
    preflight(prepare(read(Path(configuration), overrides)))


@pytest.mark.parametrize("ignored", ["*.safetensors", "mine/", "rows.parquet"])
def test_weights_and_rows_that_would_stay_here_are_refused(tmp_path: Path, ignored: str) -> None:
    folder = tmp_path / "checkout"
    files(folder, "mine/config.json", "mine/model.safetensors", "rows.parquet")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    named = ["mine", "rows.parquet"]
    package = tmp_path / "package.zip"
    pack(folder, package, named)
    assert {"mine/model.safetensors", "rows.parquet"} <= {*zipfile.ZipFile(package).namelist()}

    (folder / ".gitignore").write_text(f"{ignored}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="would not be sent: git ignores it"):
        pack(folder, package, named)


def test_weights_beside_the_folder_are_refused(tmp_path: Path) -> None:
    files(tmp_path, "checkout/a.py", "models/model.safetensors")
    with pytest.raises(ConfigError, match=r"\.\./models would not be sent: .* it lies elsewhere"):
        pack(tmp_path / "checkout", tmp_path / "package.zip", ["../models"])


@pytest.mark.parametrize("insecure", [False, True])
def test_a_printed_command_works_in_a_shell_that_knows_nothing(
    tmp_path: Path, insecure: bool
) -> None:
    """Its ``ray`` says what it was called with."""
    token = tmp_path / "my token"
    token.write_text("secret", encoding="utf-8")
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text('#!/bin/sh\necho "$RAY_AUTH_MODE $RAY_AUTH_TOKEN_PATH $@"\n', encoding="utf-8")
    ray.chmod(0o755)
    line = job_command(
        authentication(None if insecure else token, insecure),
        "http://head:8265",
        "stop",
        "raysubmit_1",
    )
    shell = {"PATH": f"{ray.parent}:/usr/bin:/bin"}
    said = subprocess.run(
        ["sh", "-c", line], env=shell, capture_output=True, text=True, check=True
    ).stdout.strip()
    expected = "disabled " if insecure else f"token {token}"
    assert said == f"{expected} job stop --address http://head:8265 raysubmit_1"
    assert "secret" not in line


def test_an_unchanged_checkout_makes_the_same_package(tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    files(folder, "a.py")
    before = pack(folder, tmp_path / "1.zip").read_bytes()
    os.utime(folder / "a.py", (1, 1))
    assert pack(folder, tmp_path / "2.zip").read_bytes() == before


def test_too_large_a_package_names_the_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.commands.submit.MAX_PACKAGE_BYTES", 2**20)
    files(tmp_path / "checkout", "small.py")
    (tmp_path / "checkout" / "weights.bin").write_bytes(os.urandom(2 * 2**20))
    with pytest.raises(
        ConfigError,
        match=r"packed it has 2 MiB, 1 are allowed. The largest files: weights\.bin \(2 MiB\)",
    ):
        packed(tmp_path / "checkout")


def test_our_own_traffic_passes_by_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert without_proxy("head-1")["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1,head-1"
    with joined_cluster("http://10.0.0.7:8265", None):
        assert os.environ["NO_PROXY"].endswith(",10.0.0.7")
    assert "NO_PROXY" not in os.environ
    with (
        pytest.raises(ConfigError, match="--token-file: nowhere is not a file"),
        joined_cluster("x:1", Path("nowhere")),
    ):
        pass


def run_config(folder: Path, shared: Path, model: Path, **changes: Any) -> Path:
    """A run whose configuration lies in the checkout, its data and output on storage that nodes
    see.
    """
    config = settings(shared, model, **changes)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def output_of(process: subprocess.Popen[str], code: int, deadline: float = 120) -> str:
    text, _ = process.communicate(timeout=deadline)
    assert process.returncode == code, text
    return text


def train_process(started: Head) -> psutil.Process:
    """The entrypoint of the job, not the shell around it."""

    def find() -> list[psutil.Process]:
        return [p for p in tagged(started.tag) if p.cmdline()[1:4] == ["-m", "rayloop", "train"]]

    return eventually(find, "the job's process", 60)[0]


@pytest.mark.slow_faults
@pytest.mark.timeout(400)
def test_jobs_on_a_head_with_a_token(tmp_path: Path, digits_model: Path) -> None:
    code, shared = checkout(tmp_path / "checkout"), tmp_path / "shared"
    shared.mkdir()
    config = run_config(code, shared, digits_model, steps=30, reward__source__with={"seconds": 0.3})
    with head(tmp_path) as started:
        assert started.status("/api/v0/actors", with_token=False) == 401
        assert started.status("/api/gcs_healthz", with_token=False) == 200
        ask = ("submit", "run.yaml", "--address", started.dashboard)
        refused = output_of(cluster_command(*ask, cwd=code, tag=started.tag), 1)
        assert "wants a token: give its file with --token-file" in refused
        refused = output_of(cluster_command(*ask, "output=runs", cwd=code, tag=started.tag), 2)
        assert "output: runs is relative, and a Ray job's working directory is deleted" in refused

        following = cluster_command(
            *ask, "--token-file", started.token, "--follow", cwd=code, tag=started.tag
        )
        metrics = shared / "run" / "metrics.jsonl"
        eventually(
            lambda: metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 2,
            "two steps",
            90,
        )
        actors = json.loads(started.read("/api/v0/actors?detail=true"))["data"]["result"]["result"]
        alive = {actor["name"].rsplit("-", 1)[0] for actor in actors if actor["state"] == "ALIVE"}
        assert {"driver", "rollout-0", "environment-0", "reward-0", "policy-0"} <= alive
        train_process(started).send_signal(signal.SIGTERM)
        text = output_of(following, 75)
        assert "package: " in text
        assert "received SIGTERM: saving" in text
        done = metrics.read_text(encoding="utf-8").count("\n")

        ray = [
            started.python,
            "-m",
            "ray.scripts.scripts",
            "job",
            "submit",
            "--address",
            started.dashboard,
        ]
        entrypoint = ["python", "-m", "rayloop", "train", config.name, f"steps={done + 1}"]
        again = subprocess.run(
            [*ray, "--working-dir", str(code), "--", *entrypoint],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(started.token)},
        )
        assert again.returncode == 0, again.stdout + again.stderr
        assert f"continues from step_{done:06d}" in again.stdout
    assert metrics.read_text(encoding="utf-8").count("\n") == done + 1


@pytest.mark.slow_faults
@pytest.mark.timeout(400)
def test_a_job_on_an_insecure_head_and_a_run_that_joins_it(
    tmp_path: Path, digits_model: Path
) -> None:
    code, shared = checkout(tmp_path / "checkout"), tmp_path / "shared"
    shared.mkdir()
    run_config(code, shared, digits_model, steps=1)
    with head(tmp_path, secure=False) as started:
        assert started.status("/api/v0/actors") == 200
        began = time.monotonic()
        ask = ("submit", "run.yaml", "--address", started.dashboard, "--insecure", "--follow")
        following = cluster_command(*ask, cwd=code, tag=started.tag)
        assert following.stdout is not None
        first = next(line for line in following.stdout if "run folder" in line)
        print(f"from submit to the first line: {time.monotonic() - began:.1f} s ({first.strip()})")
        assert "done: steps 1" in output_of(following, 0)
