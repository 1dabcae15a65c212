"""Checks of what surrounds the run: schedulers, and how far a tool's code could be locked in."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from rayloop.doctor.finding import Finding

ISOLATIONS: Mapping[str, Sequence[str]] = {
    "bubblewrap": ("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"),
    "namespaces": ("unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "true"),
}
"""Name -> a command that runs ``true`` without network, strongest first."""
LANDLOCK_CREATE_RULESET, LANDLOCK_VERSION = 444, 1
"""The system call, and the flag with which it only returns its version (linux/landlock.h)."""


def sandbox(isolations: Mapping[str, Sequence[str]] = ISOLATIONS) -> list[Finding]:
    """The strongest isolation that works here for code of tools: warning when it is less than namespaces."""
    working = next((name for name, command in isolations.items() if _works(command)), None)
    landlock = ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION)
    found = f"level: {working or ('landlock' if landlock > 0 else 'process limits')}"
    found += f" (Landlock {landlock if landlock > 0 else 'absent'})"
    if working is None:
        remedy = (
            "install bubblewrap and allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0, in a container a seccomp profile that permits unshare"
        )
        return [Finding("warning", found, remedy)]
    return [Finding("ok", found)]


def _works(command: Sequence[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=2, check=False).returncode == 0


def scheduler(environment: Mapping[str, str], which: Callable[[str], str | None] = shutil.which) -> list[Finding]:
    """Whether Slurm or Kubernetes is here; never more than information."""
    found = []
    if job := environment.get("SLURM_JOB_ID"):
        found.append(f"inside Slurm job {job}")
    elif which("sbatch"):
        found.append("Slurm (sbatch): python -m cluster slurm up")
    if environment.get("KUBERNETES_SERVICE_HOST"):
        found.append("inside a Kubernetes pod")
    elif which("kubectl"):
        found.append("kubectl: manifests in deploy/k8s")
    return [Finding("ok", "; ".join(found) or "neither Slurm nor Kubernetes")]
