"""Checks of memory, disks, limits, cores and accelerators of this machine."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from rayloop.doctor.finding import Finding, Level, size
from rayloop.engines.machine import CGROUP, quota
from rayloop.launch.limits import MemoryLimit, memory_limit
from rayloop.launch.ray_variables import LONGEST_SOCKET_PATH, MAX_SOCKET_PATH_BYTES, PREFIX

_RAY_RESERVE_BYTES = 2 * 2**30
"""Bytes of memory for Ray's daemons, the driver and the small actors."""
_PROBE_BYTES = 2**14
"""Bytes that are written to test whether a folder can be written."""
_SLOW_WRITE_S = 3.0
_MIN_FREE_SHARE = 0.05
"""The share of a disk below which Ray stops writing to it."""
_MIN_DRIVER_SERIES = 580
"""Series of NVIDIA's driver from which CUDA 13 works."""
_BUSY_GPU_MIB = 1024
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
)


def shared_memory(folder: Path, store: int) -> list[Finding]:
    """``/dev/shm`` and the object store of ``store`` bytes: warning when the store does not fit.

    Ray puts it on a disk otherwise.
    """
    free = shutil.disk_usage(folder).free
    state = f"{folder} has {size(free)} free, the object store takes {size(store)}"
    if free >= store:
        return [Finding("ok", state)]
    mebibytes = 2 * store // 2**20
    remedy = (
        f"Ray would put the store on a disk, which is slow: mount -o remount,size={mebibytes}m"
        f" {folder}; with Docker --shm-size={mebibytes}m; in Kubernetes an emptyDir with medium:"
        " Memory at /dev/shm"
    )
    return [Finding("warning", state, remedy)]


def disk(output: Path, needed: int | None, kept: int) -> list[Finding]:
    """The run's folder: error when it cannot be written or is too small, warning when it is slow.

    ``output``: the run's folder; its present checkpoints count as free. ``needed``: bytes of a
    checkpoint, None when unknown; ``kept``: the number of checkpoints.
    """
    path = output.absolute()
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        seconds = _write_seconds(folder)
    except OSError as error:
        # Without a configuration nobody has named the folder.
        level: Level = "warning" if output == Path() else "error"
        remedy = (
            "set output=FOLDER on a disk that can be written, or repair this one (mount -o"
            " remount,rw; quota -s)"
        )
        return [Finding(level, f"{folder} cannot be written: {error.strerror}", remedy)]

    usage = shutil.disk_usage(folder)
    state = f"{folder} has {size(usage.free)} free of {size(usage.total)}"
    if needed is None:
        state += "; checkpoints are predicted for a CONFIG whose model is a folder with safetensors"
        return [Finding("ok", state)]
    files = (output / "checkpoints").rglob("*")
    present = sum(file.stat().st_size for file in files if file.is_file())
    state += f"; {kept} checkpoints of {size(needed)} take {size(kept * needed)}"
    if present:
        state += f", {size(present)} exist already"
    lacking = kept * needed - present - usage.free
    if lacking > 0:
        remedy = (
            f"free {size(lacking)}, set output=FOLDER on another disk, or lower checkpoint.keep"
        )
        return [Finding("error", state, remedy)]
    if seconds > _SLOW_WRITE_S:
        state += f"; {size(_PROBE_BYTES)} took {seconds:.1f} s to be written"
        remedy = "checkpoints would hold up the run: set output=FOLDER on faster storage"
        return [Finding("warning", state, remedy)]
    return [Finding("ok", state)]


def _write_seconds(folder: Path) -> float:
    """Seconds until ``_PROBE_BYTES`` are on the disk of this folder, in a file without a name.

    Raises OSError.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(_PROBE_BYTES))
        os.fsync(file.fileno())
    return time.monotonic() - start


def memory(needed: int, limited: Callable[[], MemoryLimit | None] = memory_limit) -> list[Finding]:
    """Memory: error when the run's tensors do not fit, warning when Ray does not fit with them.

    The limits of this process count too.

    ``needed``: bytes of the tensors.
    """
    limit = limited()
    total = psutil.virtual_memory().total
    available = psutil.virtual_memory().available
    state = f"{size(available)} available of {size(total)}"
    if limit is not None and limit.most < total:
        available = min(available, limit.most - (limit.used or 0))
        state += f", limited to {size(limit.most)} by {limit.by}: {size(available)} left"
    if needed:
        state += f"; the tensors of the run take at least {size(needed)}"
    if available < needed:
        remedy = "lower rollout.actors or policy.ranks, use policy.engine.lora, or a larger machine"
        return [Finding("error", state, remedy)]
    if available < needed + _RAY_RESERVE_BYTES:
        reserve = size(_RAY_RESERVE_BYTES)
        remedy = f"end other programs: Ray and the small actors take about {reserve} more"
        return [Finding("warning", state, remedy)]
    return [Finding("ok", state)]


def temporary(folder: Path, store: int) -> list[Finding]:
    """The temporary folder: error when its name is too long, warning when it is too small.

    Ray's sockets have its name in their paths. Objects that do not fit into memory are written to
    it, at most ``store`` bytes.
    """
    path = folder.absolute()
    path_bytes = len(str(path / f"{PREFIX}12345678" / LONGEST_SOCKET_PATH).encode())
    usage = shutil.disk_usage(folder)
    state = f"{path}, {size(usage.free)} free of {size(usage.total)}"
    findings = []
    if path_bytes > MAX_SOCKET_PATH_BYTES:
        problem = (
            f"{state}: Ray's sockets would have paths of {path_bytes} bytes, the system allows"
            f" {MAX_SOCKET_PATH_BYTES}"
        )
        remedy = "export TMPDIR=/tmp, or another folder with a short name"
        findings.append(Finding("error", problem, remedy))
    if usage.free < store or usage.free < _MIN_FREE_SHARE * usage.total:
        problem = (
            f"{state}: objects that do not fit into memory are written here, and Ray stops that at"
            " 95 % use"
        )
        remedy = "remove files (old /tmp/ray sessions), or export TMPDIR=FOLDER on another disk"
        findings.append(Finding("warning", problem, remedy))
    return findings or [Finding("ok", state)]


def open_files(soft: int, hard: int, wanted: int = 8192) -> list[Finding]:
    """The limit of open files, which Ray raises to the hard limit: warning when that is too low.

    ``wanted``: the lowest limit that is enough.
    """
    unlimited = hard < 0
    state = f"limit of {soft}, can be raised to {'any' if unlimited else hard}"
    if unlimited or hard >= wanted:
        return [Finding("ok", state)]
    remedy = f"ulimit -n {wanted} as root, or LimitNOFILE / docker --ulimit nofile={wanted}"
    return [Finding("warning", state, remedy)]


def cores(usable: int, environment: Mapping[str, str], group: Path = CGROUP) -> list[Finding]:
    """Cores that may be used, and ``OMP_NUM_THREADS``: warning when it is more than the cores."""
    state = f"{usable} cores"
    limit = float(usable)
    group_limit = quota(group)
    if group_limit is not None:
        limit = min(limit, group_limit)
        state += f", limited by the control group to {limit:g}"
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads:
        state += f", OMP_NUM_THREADS={threads}"
    if threads.isdigit() and int(threads) > limit:
        remedy = f"unset OMP_NUM_THREADS, or set it to {max(1, int(limit))} or less"
        return [Finding("warning", state, remedy)]
    return [Finding("ok", state)]


@dataclass(frozen=True)
class _Gpu:
    """One line of nvidia-smi; memory is in MiB."""

    name: str
    total_mib: float
    used_mib: float
    driver: str

    @classmethod
    def read(cls, line: str) -> Self:
        name, total, used, driver = (part.strip() for part in line.rsplit(",", 3))
        return cls(name, float(total), float(used), driver)

    @property
    def driver_series(self) -> int:
        """The driver's major version; 0 for a text that is not a version."""
        first = self.driver.partition(".")[0]
        return int(first) if first.isdigit() else 0

    def __str__(self) -> str:
        used = size(self.used_mib * 2**20)
        total = size(self.total_mib * 2**20)
        return f"{self.name} ({used} of {total} used)"


def gpus(
    wanted: float,
    torch: str | None,
    environment: Mapping[str, str],
    query: Sequence[str] = NVIDIA_SMI,
    devices: Path = Path("/dev"),
) -> list[Finding]:
    """GPUs: error when too few are visible, warning when they are in use or torch cannot use them.

    ``wanted``: the number that the run needs. ``torch``: the installed version, None without torch.
    """
    severity: Level = "error" if wanted else "warning"
    cards, problem = _query_gpus(query, devices)
    if problem:
        remedy = "install the driver's tools, or start the container with them"
        return [Finding(severity, problem, remedy)]

    state = ", ".join(map(str, cards)) or "none"
    visible = _visible_gpus(len(cards), environment)
    if visible < len(cards):
        state += f"; CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']} leaves {visible}"
    findings = []
    if wanted > visible:
        state += f"; the run asks for {wanted:g}"
        remedy = "lower the roles' num_gpus, or join a cluster with --address"
        findings.append(Finding("error", state, remedy))
    if cards and torch is not None and torch.endswith("+cpu"):
        problem = f"{state}; torch {torch} cannot use them"
        findings.append(Finding("warning", problem, "install torch's CUDA build"))
    old_drivers = {gpu.driver for gpu in cards if gpu.driver_series < _MIN_DRIVER_SERIES}
    if old_drivers:
        remedy = (
            f"update it to the {_MIN_DRIVER_SERIES} series or newer: the tested torch and vLLM are"
            " built for CUDA 13"
        )
        problem = f"NVIDIA driver {', '.join(sorted(old_drivers))}"
        findings.append(Finding(severity, problem, remedy))
    busy = [str(gpu) for gpu in cards if gpu.used_mib > _BUSY_GPU_MIB]
    if busy:
        remedy = "nvidia-smi names the processes; a killed engine may have left one behind"
        findings.append(Finding("warning", f"memory in use: {', '.join(busy)}", remedy))
    return findings or [Finding("ok", state)]


def _query_gpus(query: Sequence[str], devices: Path) -> tuple[list[_Gpu], str]:
    """The GPUs of this machine, and why they are unknown ("" when they are known)."""
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=4, check=True)
    except FileNotFoundError:
        has_devices = any(devices.glob("nvidia[0-9]*"))
        return [], "there are device files, but no nvidia-smi" if has_devices else ""
    except subprocess.CalledProcessError as error:
        return [], f"nvidia-smi: {(error.stderr or error.stdout).strip()[-200:]}"
    return [_Gpu.read(line) for line in answer.stdout.splitlines()], ""


def _visible_gpus(count: int, environment: Mapping[str, str]) -> int:
    """How many of the GPUs ``CUDA_VISIBLE_DEVICES`` leaves."""
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return count
    indices = [index for index in variable.split(",") if index not in ("", "-1")]
    return min(count, len(indices))
