"""Checks of memory, disks, limits, cores and accelerators of this machine."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from rayloop.doctor.finding import Finding, Level, size
from rayloop.engines.machine import CGROUP, quota
from rayloop.launch.limits import MemoryLimit, memory_limit

SOCKET_LIMIT = 107
"""Bytes in the path of a Unix socket, on Linux."""
SOCKET = (
    "rayloop-12345678/ray-12345678/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
)
"""The longest path that Ray makes below our temporary folder (rayloop/launch/ray_variables.py,
cluster/session.py).
"""
RAY_RESERVE = 2 * 2**30
"""Bytes of memory for Ray's daemons, the driver and the small actors."""
PROBE, SLOW = 2**14, 3.0
"""Bytes that are written to see whether they can be, and seconds after which that is slow."""
DRIVER = 580
"""Series of NVIDIA's driver from which CUDA 13 works."""
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
)


def shared_memory(folder: Path, store: int) -> list[Finding]:
    """``/dev/shm`` holds the object store of ``store`` bytes: warning, since Ray goes to a disk
    otherwise.
    """
    free = shutil.disk_usage(folder).free
    found = f"{folder} has {size(free)} free, the object store takes {size(store)}"
    if free < store:
        remedy = (
            "Ray would put the store on a disk, which is slow: mount -o"
            f" remount,size={2 * store // 2**20}m {folder}; with Docker"
            f" --shm-size={2 * store // 2**20}m; in Kubernetes an emptyDir with medium: Memory at"
            " /dev/shm"
        )
        return [Finding("warning", found, remedy)]
    return [Finding("ok", found)]


def disk(output: Path, needed: int | None, kept: int) -> list[Finding]:
    """Whether the folder can be written and has room for ``kept`` checkpoints of ``needed`` bytes
    (error), fast enough (warning).

    ``output``: the run's folder; its present checkpoints count as free. ``needed`` None: unknown.
    """
    there = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    try:
        seconds = _written(there)
    except OSError as error:
        remedy = (
            "set output=FOLDER on a disk that can be written, or repair this one (mount -o"
            " remount,rw; quota -s)"
        )
        level: Level = (
            "warning" if output == Path() else "error"
        )  # without a configuration nobody has named the folder
        return [Finding(level, f"{there} cannot be written: {error.strerror}", remedy)]
    usage = shutil.disk_usage(there)
    found = f"{there} has {size(usage.free)} free of {size(usage.total)}"
    if needed is None:
        return [
            Finding(
                "ok",
                f"{found}; checkpoints are predicted for a CONFIG whose model is a folder with"
                " safetensors",
            )
        ]
    present = sum(
        file.stat().st_size for file in (output / "checkpoints").rglob("*") if file.is_file()
    )
    found += f"; {kept} checkpoints of {size(needed)} take {size(kept * needed)}"
    if present:
        found += f", {size(present)} are there"
    if usage.free + present < kept * needed:
        remedy = (
            f"free {size(kept * needed - present - usage.free)}, set output=FOLDER on another disk,"
            " or lower checkpoint.keep"
        )
        return [Finding("error", found, remedy)]
    if seconds > SLOW:
        slow = f"{found}; {size(PROBE)} took {seconds:.1f} s to be written"
        return [
            Finding(
                "warning",
                slow,
                "checkpoints would hold up the run: set output=FOLDER on faster storage",
            )
        ]
    return [Finding("ok", found)]


def _written(folder: Path) -> float:
    """Seconds until ``PROBE`` bytes are on the disk of this folder, in a file without a name.

    Raises OSError.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(PROBE))
        os.fsync(file.fileno())
    return time.monotonic() - began


def memory(needed: int, limited: Callable[[], MemoryLimit | None] = memory_limit) -> list[Finding]:
    """Memory for ``needed`` bytes of tensors (error) and for Ray (warning), below all limits of
    this process.
    """
    limit = limited()
    available = psutil.virtual_memory().available
    found = f"{size(available)} available of {size(psutil.virtual_memory().total)}"
    if limit is not None and limit.most < psutil.virtual_memory().total:
        available = min(available, limit.most - (limit.used or 0))
        found += f", limited to {size(limit.most)} by {limit.by}: {size(available)} left"
    if needed:
        found += f"; the tensors of the run take at least {size(needed)}"
    if available < needed:
        return [
            Finding(
                "error",
                found,
                "lower rollout.actors or policy.ranks, use policy.engine.lora, or a larger machine",
            )
        ]
    if available < needed + RAY_RESERVE:
        return [
            Finding(
                "warning",
                found,
                f"end other programs: Ray and the small actors take about {size(RAY_RESERVE)} more",
            )
        ]
    return [Finding("ok", found)]


def temporary(folder: Path, store: int) -> list[Finding]:
    """The temporary folder: error when its name is too long for Ray's sockets, warning when
    ``store`` bytes cannot spill.
    """
    path = folder.absolute() / SOCKET
    usage = shutil.disk_usage(folder)
    found = f"{folder.absolute()}, {size(usage.free)} free of {size(usage.total)}"
    findings = []
    if len(str(path).encode()) > SOCKET_LIMIT:
        long = (
            f"{found}: Ray's sockets would have paths of {len(str(path).encode())} bytes, the"
            f" system allows {SOCKET_LIMIT}"
        )
        findings.append(
            Finding("error", long, "export TMPDIR=/tmp, or another folder with a short name")
        )
    if usage.free < store or usage.free < 0.05 * usage.total:
        full = (
            f"{found}: objects that do not fit into memory are written here, and Ray stops that at"
            " 95 % use"
        )
        findings.append(
            Finding(
                "warning",
                full,
                "remove files (old /tmp/ray sessions), or export TMPDIR=FOLDER on another disk",
            )
        )
    return findings or [Finding("ok", found)]


def open_files(soft: int, hard: int, wanted: int = 8192) -> list[Finding]:
    """The limit of open files, which Ray raises as far as it may: warning below ``wanted``."""
    effective = wanted if hard < 0 else hard
    found = f"limit of {soft}, can be raised to {'any' if hard < 0 else hard}"
    if effective < wanted:
        return [
            Finding(
                "warning",
                found,
                f"ulimit -n {wanted} as root, or LimitNOFILE / docker --ulimit nofile={wanted}",
            )
        ]
    return [Finding("ok", found)]


def cores(usable: int, environment: Mapping[str, str], group: Path = CGROUP) -> list[Finding]:
    """Cores that may be used, and ``OMP_NUM_THREADS``: warning when threads would crowd them."""
    found, most = f"{usable} cores", float(usable)
    if (limit := quota(group)) is not None:
        most = min(most, limit)
        found += f", limited by the control group to {most:g}"
    threads = environment.get("OMP_NUM_THREADS", "")
    found += f", OMP_NUM_THREADS={threads}" if threads else ""
    if threads.isdigit() and int(threads) > most:
        return [
            Finding(
                "warning", found, f"unset OMP_NUM_THREADS, or set it to {max(1, int(most))} or less"
            )
        ]
    return [Finding("ok", found)]


def gpus(
    wanted: float,
    torch: str | None,
    environment: Mapping[str, str],
    query: Sequence[str] = NVIDIA_SMI,
    devices: Path = Path("/dev"),
) -> list[Finding]:
    """GPUs: error when fewer than ``wanted`` are visible, warning when they are in use or ``torch``
    (a version) cannot.
    """
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=4, check=True)
    except FileNotFoundError:
        lines: list[str] = []
        problem = (
            "there are device files, but no nvidia-smi"
            if list(devices.glob("nvidia[0-9]*"))
            else ""
        )
    except subprocess.CalledProcessError as error:
        lines, problem = [], f"nvidia-smi: {(error.stderr or error.stdout).strip()[-200:]}"
    else:
        lines, problem = asked.stdout.splitlines(), ""
    if problem:
        return [
            Finding(
                "error" if wanted else "warning",
                problem,
                "install the driver's tools, or start the container with them",
            )
        ]
    hidden = environment.get("CUDA_VISIBLE_DEVICES")
    visible = (
        len(lines)
        if hidden is None
        else min(len(lines), len([i for i in hidden.split(",") if i not in ("", "-1")]))
    )
    found = ", ".join(_gpu(line) for line in lines) or "none"
    if visible < len(lines):
        found += f"; CUDA_VISIBLE_DEVICES={hidden} leaves {visible}"
    findings = []
    if wanted > visible:
        found += f"; the run asks for {wanted:g}"
        findings.append(
            Finding("error", found, "lower the roles' num_gpus, or join a cluster with --address")
        )
    if lines and torch is not None and torch.endswith("+cpu"):
        findings.append(
            Finding(
                "warning", f"{found}; torch {torch} cannot use them", "install torch's CUDA build"
            )
        )
    old = sorted(
        {version for line in lines if _major(version := line.rsplit(",", 1)[1].strip()) < DRIVER}
    )
    if old:
        advice = (
            f"update it to the {DRIVER} series or newer: the tested torch and vLLM are built for"
            " CUDA 13"
        )
        findings.append(
            Finding("error" if wanted else "warning", f"NVIDIA driver {', '.join(old)}", advice)
        )
    busy = [line for line in lines if float(line.rsplit(",", 2)[1]) > 1024]
    if busy:
        held = f"memory in use: {', '.join(map(_gpu, busy))}"
        findings.append(
            Finding(
                "warning",
                held,
                "nvidia-smi names the processes; a killed engine may have left one behind",
            )
        )
    return findings or [Finding("ok", found)]


def _major(version: str) -> int:
    """0 of what is no version, which is an old driver, too."""
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _gpu(line: str) -> str:
    name, total, used, _ = (part.strip() for part in line.rsplit(",", 3))
    return f"{name} ({size(float(used) * 2**20)} of {size(float(total) * 2**20)} used)"
