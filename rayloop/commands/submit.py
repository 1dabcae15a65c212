"""``submit``: run ``train`` as a Ray job on a cluster.

The cluster has the dependencies, but not this checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import getproxies

from rayloop.commands.arguments import add_run
from rayloop.core.failures import ConfigError, RayloopError
from rayloop.core.threads import complete
from rayloop.launch.ray_variables import authentication, joined_cluster, past_proxies
from rayloop.run.config import read
from rayloop.run.preflight import lasting

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

KEY_SUFFIXES = (".key", ".pem", ".p12", ".token")
"""Suffixes of files that hold a secret: files of this package, and common ones."""
DATA_FOLDERS = ("runs", "checkpoints", "wandb", "node_modules", "build", "dist")
"""Names of folders that hold data and not code.

Hidden folders, environments and caches are left out, too.
"""
WEIGHTS_AND_ROWS = (".safetensors", ".parquet")
"""Suffixes of files that are sent only where the configuration names them, or their folder."""
MAX_PACKAGE_BYTES = 200 * 2**20
"""The most bytes of the package. Ray itself refuses 500 MiB, with an error that does not say so."""
CONTACT_TIMEOUT_S = 60.0
"""Seconds without contact to the head after which following a job is given up."""
POLL_INTERVAL_S = 1.0


class SubmissionFailed(RayloopError):
    """The head did not take the job, or could not be reached any more while it was followed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``submit``."""
    add_run(parser, "output=/shared/runs steps=200")
    parser.add_argument(
        "--address", required=True, metavar="http://HEAD:8265", help="the cluster's dashboard"
    )
    parser.add_argument(
        "--token-file", type=Path, help="the cluster's token (default: RAY_AUTH_TOKEN_PATH)"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="for a cluster that was started without a token"
    )
    parser.add_argument(
        "--working-dir",
        type=Path,
        default=Path(),
        help="the checkout to send (default: this folder)",
    )
    parser.add_argument(
        "--follow", action="store_true", help="show the log and end with the job's exit code"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the run here, send the folder and start ``train`` in it.

    Returns 0, or with --follow the job's exit code.
    """
    # A bad configuration is refused here, not on the cluster.
    config = read(arguments.config, arguments.overrides)
    lasting(config.output)
    address = arguments.address
    folder = arguments.working_dir.resolve()
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address {address}: expected the dashboard, http://HEAD:8265")
    if not arguments.config.resolve().is_relative_to(folder):
        raise ConfigError(
            f"{arguments.config} is not below {folder}, the folder that is sent. See --working-dir"
        )
    file = str(arguments.config.resolve().relative_to(folder))
    command = shlex.join(["python", "-m", "rayloop", "train", file, *arguments.overrides])
    paths = (config.model.path, config.reference.path, config.data.train, config.data.eval)
    # An absolute path is storage that the nodes see, and what is not here may be on the Hub.
    named = [
        path for path in paths if path and not Path(path).is_absolute() and (folder / path).exists()
    ]
    with (
        joined_cluster(address, arguments.token_file, arguments.insecure),
        tempfile.TemporaryDirectory() as temporary,
    ):
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient

        package = pack(folder, Path(temporary) / "package.zip", named)
        print(
            f"package: {package.stat().st_size / 2**20:.1f} MiB; weights and rows:"
            f" {', '.join(named) or 'none'}"
        )
        try:
            client = JobSubmissionClient(address)
            job = client.submit_job(entrypoint=command, runtime_env={"working_dir": str(package)})
        except AuthenticationError as error:
            raise SubmissionFailed(
                f"{address} wants a token: give its file with --token-file"
            ) from error
        except (ConnectionError, RuntimeError) as error:
            raise SubmissionFailed(
                f"{address} did not take the job: {str(error).splitlines()[0]}"
            ) from error
        print(f"job: {job}")
        variables = authentication(arguments.token_file, arguments.insecure)
        if getproxies():
            variables = {**variables, **past_proxies(address)}
        print(f"  log:  {job_command(variables, address, 'logs', '--follow', job)}")
        print(f"  stop: {job_command(variables, address, 'stop', job)}")
        return follow(client, job) if arguments.follow else 0


def job_command(variables: Mapping[str, str], address: str, action: str, *words: str) -> str:
    """A command of Ray's about a job, as a line for a shell without the ``variables``.

    The variables are the ones that reach the cluster.
    """
    prefix = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*prefix, shlex.join(["ray", "job", action, "--address", address, *words])])


def pack(folder: Path, package: Path, named: Sequence[str] = ()) -> Path:
    """A zip of all files that git does not ignore; without git, of all but data and caches.

    Keys, links that lead elsewhere, and weights and rows outside the ``named`` paths are not sent.
    Raises ConfigError above MAX_PACKAGE_BYTES, and where a named path's weights or rows stay here.
    """
    candidates = [file for file in _files(folder) if not _is_data(file)]
    refused = [file for file in candidates if not _may_be_sent(folder, file, named)]
    files = sorted({*candidates} - {*refused})
    if refused:
        print(
            "not sent, since they are keys, links that lead elsewhere, or weights and rows that the"
            f" configuration does not name: {', '.join(map(str, refused[:5]))}",
            flush=True,
        )
    sent = {folder / file for file in files}
    for path in named:
        here = folder / path
        weights_or_rows = filter(Path.is_file, (here, *here.rglob("*.safetensors")))
        if not sent.issuperset(weights_or_rows):
            raise ConfigError(
                f"{path} would not be sent: git ignores it, its folder is for data, or it lies"
                " elsewhere. Copy it to storage that the nodes see, and name its absolute path"
            )
    with zipfile.ZipFile(package, "w") as archive:
        for file in files:
            # A fixed time stamp: Ray recognises a package that it has by its hash.
            entry = zipfile.ZipInfo(str(file))
            entry.external_attr = ((folder / file).stat().st_mode & 0o777) << 16
            archive.writestr(entry, (folder / file).read_bytes(), zipfile.ZIP_DEFLATED)
    size = package.stat().st_size
    if size > MAX_PACKAGE_BYTES:
        largest = sorted(archive.infolist(), key=lambda entry: -entry.file_size)[:5]
        names = ", ".join(f"{entry.filename} ({entry.file_size >> 20} MiB)" for entry in largest)
        raise ConfigError(
            f"{folder.resolve()}: packed it has {size / 2**20:.0f} MiB,"
            f" {MAX_PACKAGE_BYTES / 2**20:.0f} are allowed. The largest files: {names}. Data and"
            " models belong on storage that the nodes see; git-ignore them or move them"
        )
    return package


def _may_be_sent(folder: Path, file: Path, named: Sequence[str]) -> bool:
    """Whether a file is neither a key, nor outside the folder, nor weights or rows without name."""
    is_inside = (folder / file).resolve().is_relative_to(folder.resolve())
    is_used = file.suffix not in WEIGHTS_AND_ROWS or any(map(file.is_relative_to, named))
    return is_inside and is_used and file.suffix not in KEY_SUFFIXES


def _files(folder: Path) -> list[Path]:
    """The files to pack.

    A link to a folder becomes that folder: a job's machine unpacks no links.
    """
    listing = subprocess.run(
        ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        paths = [Path(name) for name in listing.stdout.split("\0") if name]
    else:
        paths = [path.relative_to(folder) for path in folder.rglob("*")]
    root = folder.resolve()
    files = set(paths)
    for path in paths:
        # rayloop/__init__.py finds the folders of a checkout in the root:
        # through the package's links they would be sent twice.
        if path.parent == Path("rayloop") or not (folder / path).is_symlink():
            continue
        target = (folder / path).resolve()
        if target.is_dir():
            for file in paths:
                if (root / file).is_relative_to(target):
                    files.add(path / (root / file).relative_to(target))
    return sorted(file for file in files if (folder / file).is_file())


def _is_data(file: Path) -> bool:
    return any(
        name in DATA_FOLDERS
        or name.startswith((".", "__pycache__", "venv"))
        or name.endswith(".egg-info")
        for name in file.parts
    )


def follow(client: JobSubmissionClient, job: str) -> int:
    """Show the job's log until it ends.

    Returns its exit code, or 1. Raises SubmissionFailed when the head is silent.
    """
    printed = 0
    last_contact = time.monotonic()
    while True:
        try:
            printed = complete(_show(client, job, printed))
            info = client.get_job_info(job)
            last_contact = time.monotonic()
        except (OSError, RuntimeError, asyncio.IncompleteReadError) as error:
            if time.monotonic() - last_contact > CONTACT_TIMEOUT_S:
                raise SubmissionFailed(
                    f"no contact to the head for {CONTACT_TIMEOUT_S:g} s ({error}); job {job} may"
                    " still be running"
                ) from error
            time.sleep(POLL_INTERVAL_S)
            continue
        except KeyboardInterrupt:
            print(f"\njob {job} goes on", file=sys.stderr)
            return 0
        if info.status.is_terminal():
            if info.driver_exit_code is not None:
                return int(info.driver_exit_code)
            reason = (info.message or "no message").splitlines()[0]
            print(
                f"rayloop: the job ended without an exit code: {info.status} ({reason})",
                file=sys.stderr,
            )
            return 1
        time.sleep(POLL_INTERVAL_S)


async def _show(client: JobSubmissionClient, job: str, printed: int) -> int:
    """Print the log from character ``printed`` on, and return its length.

    A new connection starts again at the beginning.
    """
    position = 0
    async for text in client.tail_job_logs(job):
        print(text[max(0, printed - position) :], end="", flush=True)
        position += len(text)
        printed = max(printed, position)
    return printed
