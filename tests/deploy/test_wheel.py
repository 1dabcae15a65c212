"""What an installed wheel promises, away from any checkout: its files, every command, the Slurm
scripts, a shipped recipe.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rayloop.cli import COMMANDS

ROOT = Path(__file__).parents[2]
FOLDERS = {"judge", "recipes", "actors", "cluster", "serve_apps"}
"""Beside ``rayloop`` in the repository, below it where it is installed."""
PIP = [sys.executable, "-m", "pip"]
MODEL = "recipes/arc_vision/loose"
"""The quickstart's, and the only one in the wheel."""
LEFT_OUT = ("recipes/*/tiny/*", "recipes/*/published*.yaml")
"""The other recipes' models, and the sources of a page: they are in the checkout."""
BYTES = 10_500_000
"""Of the wheel: the model and the pages of the quickstart are 8.3 MB of it."""
pytestmark = pytest.mark.timeout(300)


def tracked() -> list[str]:
    """The files of this checkout that git knows, and its links to folders."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [name for name in found.stdout.split("\0") if name and (ROOT / name).exists()]


def copy_checkout(target: Path, links: bool) -> Path:
    """A copy of the tracked files.

    Without ``links`` each link is a text file, as zipfile and Git for Windows leave it.
    """
    for name in tracked():
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink() and not links:
            copied.write_text(os.readlink(ROOT / name), encoding="utf-8")
        else:
            shutil.copy(ROOT / name, copied, follow_symlinks=False)
    return target


def build(source: Path, out: Path) -> Path:
    """The wheel of ``source``, in the folder ``out``."""
    command = [
        *PIP,
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(out),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("rayloop-*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tracked files: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    return build(copy_checkout(folder / "source", links=True), folder)


@pytest.fixture(scope="module")
def without_links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which the links are text files."""
    return copy_checkout(tmp_path_factory.mktemp("without_links") / "source", links=False)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    install = [
        *PIP,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(wheel),
    ]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(installed: Path, at: Path, *command: str | Path) -> str:
    """What a command prints, run in the folder ``at`` with the installed wheel before everything
    else.
    """
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        list(map(str, command)),
        cwd=at,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_has_one_package_with_all_files_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rayloop"}
    shipped = [name for name in tracked() if not any(map(Path(name).match, LEFT_OUT))]
    beside = {f"rayloop/{name}" for name in shipped if name.split("/")[0] in FOLDERS}
    inside = {
        name for name in tracked() if name.startswith("rayloop/") and not (ROOT / name).is_dir()
    }
    assert inside | beside <= set(names)
    assert not [name for name in names if name.startswith("rayloop/benchmarks/")], (
        "measurements stay in the checkout"
    )


def test_a_wheel_is_small_and_has_the_model_of_the_quickstart(wheel: Path) -> None:
    assert f"path: {MODEL}," in (ROOT / "recipes/arc_vision/quickstart.yaml").read_text("utf-8")
    assert wheel.stat().st_size < BYTES
    packed = contents(wheel)
    for file in (ROOT / MODEL).iterdir():
        assert packed[f"rayloop/{MODEL}/{file.name}"] == file.read_bytes()
    weights = [name for name in packed if name.endswith(".safetensors")]
    assert weights == [f"rayloop/{MODEL}/model.safetensors"]


@pytest.mark.parametrize("recipe", ["arpo", "chart_rvr", "pyvision"])
def test_a_recipe_without_its_model_says_what_makes_it(
    installed: Path, tmp_path: Path, recipe: str
) -> None:
    """From the folder of the packages, where the recipe's paths begin."""
    config = f"recipes/{recipe}/quickstart.yaml"
    output = f"output={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rayloop", "train", config, output],
        cwd=installed / "rayloop",
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rayloop: ConfigError: model.path: recipes/{recipe}/tiny is neither")
    assert line.endswith(f"`python -m tools.makers {recipe}` makes it there")


def test_a_checkout_without_links_runs_every_command(without_links: Path) -> None:
    """As unpacked, before anything is installed: what a Ray job's package is."""
    program = (
        "import importlib, sys; [importlib.import_module(f'rayloop.{name}') for name in"
        " sys.argv[1:]]"
    )
    run(without_links, without_links, sys.executable, "-c", program, *sorted(FOLDERS))
    assert "usage" in run(
        without_links, without_links, sys.executable, "-m", "rayloop", "judge", "--help"
    )


def test_a_checkout_without_links_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    expected = contents(wheel)
    assert contents(build(copy_checkout(tmp_path / "source", links=False), tmp_path)) == expected


def contents(wheel: Path) -> dict[str, bytes]:
    """Bytes by name of all but the list of files, whose order may differ."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")
        }


def test_every_command_has_its_help(installed: Path, tmp_path: Path) -> None:
    assert all(
        word in run(installed, tmp_path, installed / "bin" / "rayloop", "--help")
        for word in COMMANDS
    )
    program = (
        "import contextlib, sys, rayloop\n"
        "from rayloop.cli import main\n"
        "print(rayloop.__file__)\n"
        "for word in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main([word, '--help'])\n"
    )
    said = run(installed, tmp_path, sys.executable, "-c", program, *COMMANDS)
    assert said.startswith(str(installed)), "the checkout was imported"
    assert [word for word in COMMANDS if f"usage: python -m rayloop {word} " not in said] == []


def test_slurm_jobs_run_the_scripts_that_were_installed(installed: Path, tmp_path: Path) -> None:
    said = run(installed, tmp_path, sys.executable, "-m", "rayloop", "slurm", "render")
    scripts = [
        Path(word)
        for word in shlex.split(said.replace("$(", " ").replace(")", " "))
        if word.endswith(".sbatch")
    ]
    assert [script.name for script in scripts] == ["ray_head.sbatch", "ray_worker.sbatch"]
    for script in scripts:
        assert script.is_relative_to(installed)
        assert script.read_text(encoding="utf-8") == (
            ROOT / "deploy/slurm" / script.name
        ).read_text(encoding="utf-8")


def test_every_slurm_script_is_in_the_wheel(wheel: Path) -> None:
    shipped = {
        path.name
        for path in (ROOT / "deploy/slurm").iterdir()
        if path.suffix in (".sbatch", ".yaml")
    }
    packed = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert {path.name for path in packed if path.parent.name == "slurm_scripts"} == shipped


@pytest.mark.slow
def test_a_shipped_recipe_can_be_tried(installed: Path) -> None:
    """In the folder of the packages: the recipe's paths are relative."""
    said = run(
        installed,
        installed / "rayloop",
        sys.executable,
        "-P",
        "-m",
        "rayloop",
        "try",
        "recipes/arc_vision/quickstart.yaml",
    )
    assert "what the model sees" in said
    assert "answer 2" in said
