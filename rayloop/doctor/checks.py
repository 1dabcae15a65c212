"""``doctor``: problems of this machine and of a configuration, each with its remedy."""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rayloop.core.failures import ConfigError, DeadlineExceeded, counted
from rayloop.core.model_families import UNADAPTED, experts
from rayloop.core.threads import in_thread
from rayloop.doctor import machine, network, software
from rayloop.doctor.finding import Finding
from rayloop.engines.machine import cores, open_files
from rayloop.engines.settings import FsdpSettings, VllmEngineSettings
from rayloop.engines.shape import Shape
from rayloop.estimate.memory import of_reference
from rayloop.launch.network import this_node
from rayloop.launch.ray_variables import OBJECT_STORE_BYTES
from rayloop.run.config import RunConfig
from rayloop.run.demand import SHARED_MEMORY, bundles, store_wanted, total
from rayloop.run.preflight import Prepared, beyond_positions, idle_settings, preflight

_DEADLINE_S = 5.0
"""Seconds for one check; all run at once."""
_FLOAT32_BYTES = 4
"""Bytes of an element of master weights, gradients and AdamW's moments."""
_BFLOAT16_BYTES = 2
_CHECKPOINT_TENSORS = 3
"""The trained weights, and the two moments of AdamW."""


def checks(
    prepared: Prepared | None, address: str | None, token_file: Path | None, ports: list[int]
) -> dict[str, partial[list[Finding]]]:
    """The checks of this machine, by name.

    ``prepared``: a run that is checked for too; ``address``: the cluster that it would join.
    """
    environment = dict(os.environ)
    node = this_node()
    torch = software.installed_version("torch")
    tested = software.fitting_set()
    packages = (software.pins(tested), software.supported_packages())
    running_python = ".".join(map(str, sys.version_info[:3]))
    demand = _demand(prepared, address)
    # In the order in which they would stop a run: its start, its cluster, its folders, its memory.
    return {
        "python": partial(software.python, running_python, *software.python_versions()),
        "packages": partial(software.packages, *packages, file=tested),
        "configuration": partial(configuration, prepared),
        "ray address": partial(network.ray_address, address),
        "token": partial(network.token, environment, token_file, Path.home()),
        "proxies": partial(network.proxies, environment, _internal_hosts(node, address)),
        "ports": partial(network.ports, ports),
        "dashboard": partial(network.dashboards, {network.DASHBOARD_PORT, *ports}, address, node),
        "gpus": partial(machine.gpus, demand.gpus, torch, environment),
        "cores": partial(machine.cores, cores(), environment),
        "open files": partial(machine.open_files, *open_files()),
        "temporary folder": partial(machine.temporary, Path(tempfile.gettempdir()), demand.store),
        "shared memory": partial(machine.shared_memory, SHARED_MEMORY, demand.store),
        "memory": partial(machine.memory, demand.tensors),
        "disk": partial(machine.disk, demand.output, demand.checkpoint, demand.checkpoints),
        "sandbox": partial(software.sandbox),
        "browser": partial(software.browser),
        "desktop": partial(software.desktop),
        "scheduler": partial(software.scheduler, environment),
    }


@dataclass
class _Demand:
    """The demands of a run on this machine; the defaults are for no run."""

    output: Path = Path()
    checkpoints: int = 0
    checkpoint: int | None = None
    """Bytes of one checkpoint; None when they are unknown."""
    gpus: float = 0.0
    store: int = OBJECT_STORE_BYTES
    """Bytes of the object store."""
    tensors: int = 0
    """Bytes of main memory for tensors."""


def _demand(prepared: Prepared | None, address: str | None) -> _Demand:
    if prepared is None:
        return _Demand()
    config = prepared.config
    # ``configuration`` reports why the shape is not known.
    model = prepared.model.known_shape
    demand = _Demand(config.folder, config.checkpoint.keep + 1)
    if model is not None:
        demand.checkpoint = checkpoint_bytes(config.policy.engine, model)
    # In a cluster the roles may run on other machines.
    if address is None:
        demand.gpus = total(bundles(config)).get("GPU", 0.0)
        demand.store = store_wanted(config.policy.engine.dtype, model.parameters if model else 0)
        demand.tensors = tensor_bytes(config, model) if model else 0
    return demand


def _internal_hosts(node: str | None, address: str | None) -> dict[str, None]:
    """The hosts to which requests stay inside the cluster, in order."""
    hosts = ["localhost", "127.0.0.1", socket.gethostname()]
    if node:
        hosts.append(node)
    if address and address not in ("auto", "local"):
        head, _ = network.place(address)
        hosts.append(head)
    return dict.fromkeys(hosts)


async def examine(
    checks: Mapping[str, Callable[[], list[Finding]]], deadline: float = _DEADLINE_S
) -> dict[str, list[Finding]]:
    """The findings of all checks, which run at once.

    A check that fails or takes longer than ``deadline`` seconds is an error itself.
    """

    async def findings_of(check: Callable[[], list[Finding]]) -> list[Finding]:
        try:
            return await in_thread(check, timeout=deadline)
        except DeadlineExceeded as error:
            remedy = "look at what it looks at by hand: a network file system or a command hangs"
            return [Finding("error", f"the check gave {error}", remedy)]
        except Exception as error:
            state = f"the check failed: {type(error).__name__}: {error}"
            remedy = (
                "see the message; if nothing is wrong with this machine, it is an error of doctor"
            )
            return [Finding("error", state, remedy)]

    findings = await asyncio.gather(*map(findings_of, checks.values()))
    return dict(zip(checks, findings, strict=True))


def text(findings_by_check: Mapping[str, list[Finding]]) -> str:
    """One line per finding, a second one with its remedy, and a summary."""
    width = max(map(len, findings_by_check))
    lines = []
    levels = []
    for name, findings in findings_by_check.items():
        for finding in findings:
            levels.append(finding.level)
            lines.append(f"{finding.level:<8} {name:<{width}}  {finding.found}")
            if finding.remedy:
                lines.append(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    errors = counted(levels.count("error"), "error")
    warnings = counted(levels.count("warning"), "warning")
    return "\n".join([*lines, "", f"{errors}, {warnings}"])


def configuration(prepared: Prepared | None) -> list[Finding]:
    """The files and packages that CONFIG names: error when one is missing."""
    if prepared is None:
        return [Finding("ok", "no CONFIG given")]
    config = prepared.config
    try:
        preflight(prepared)
        positions = beyond_positions(prepared)
    except ConfigError as error:
        state, _, remedy = str(error).partition(". ")
        return [Finding("error", state, remedy or "correct the file")]
    findings = [Finding("ok", f"run {config.name}: model, data and loggers exist")]
    for message in filter(None, (positions, *idle_settings(config))):
        state, _, remedy = message.partition(". ")
        findings.append(Finding("warning", state, remedy))
    if config.policy.engine.lora is not None:
        model = prepared.model.known_shape
        if model is not None and experts(model.config):
            remedy = "leave policy.engine.lora out to train them"
            findings.append(Finding("warning", f"policy.engine.lora: {UNADAPTED}", remedy))
    return findings


def checkpoint_bytes(engine: FsdpSettings, model: Shape) -> int:
    """Bytes of one checkpoint: the trained weights and their optimizer state, in float32."""
    return _FLOAT32_BYTES * model.trained(engine) * _CHECKPOINT_TENSORS


def tensor_bytes(config: RunConfig, model: Shape) -> int:
    """Bytes of main memory for the tensors of all roles: a lower bound, without activations.

    Roles on GPUs keep copies in it.
    """
    weights = model.parameters
    needed = 0
    policy = config.policy
    if not policy.placement.num_gpus or policy.engine.cpu_offload:
        # A checkpoint, the frozen weights, and the gradients, which are as large as the trained
        # weights.
        needed += checkpoint_bytes(policy.engine, model) + _FLOAT32_BYTES * weights
    if policy.placement.num_gpus:
        # The first rank loads the complete model at the start and exports it later, and each engine
        # of vLLM gets a copy.
        copies = config.rollout.actors if isinstance(config.engine, VllmEngineSettings) else 0
        exported = weights * _bytes_of(policy.engine.dtype)
        needed += max(_FLOAT32_BYTES * weights, exported * (1 + copies))
    if not config.rollout.placement.num_gpus and config.engine.holds_model:
        needed += config.rollout.actors * weights * _bytes_of(config.engine.dtype)
    if config.reference_kind == "actor" and not config.reference.placement.num_gpus:
        needed += config.reference.actors * of_reference(config.reference, model) * _FLOAT32_BYTES
    return needed


def _bytes_of(dtype: str) -> int:
    """Bytes of an element of this type."""
    return _BFLOAT16_BYTES if dtype == "bfloat16" else _FLOAT32_BYTES
