"""``doctor``: problems of this machine and of a configuration, each with its remedy."""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rayloop.core.failures import ConfigError, DeadlineExceeded, counted
from rayloop.core.model_families import UNADAPTED, experts
from rayloop.core.threads import in_thread
from rayloop.doctor import machine, network, software
from rayloop.doctor.finding import Finding
from rayloop.engines.machine import cores, open_files
from rayloop.engines.settings import VllmEngineSettings
from rayloop.estimate.memory import of_reference
from rayloop.estimate.shape import Shape, read_shape
from rayloop.launch.network import this_node
from rayloop.launch.ray_variables import OBJECT_STORE
from rayloop.run.config import RunConfig
from rayloop.run.demand import SHARED_MEMORY, bundles, store_wanted, total
from rayloop.run.preflight import beyond_positions, idle_settings, preflight

DEADLINE = 5.0
"""Seconds for one check; all run at once."""
FLOAT = 4
"""Bytes of a float32: master weights, gradients and both of AdamW's moments."""


def checks(
    config: RunConfig | None, address: str | None, token_file: Path | None, ports: list[int]
) -> dict[str, partial[list[Finding]]]:
    """Name -> check of this machine.

    ``config``: what a run of it needs; ``address``: the cluster that it would join.
    """
    environment, model = dict(os.environ), shape(config) if config else None
    node = this_node()
    joined = [network.place(address)[0]] if address and address not in ("auto", "local") else []
    internal = dict.fromkeys(
        ["localhost", "127.0.0.1", socket.gethostname(), *([node] if node else []), *joined]
    )
    alone = config is not None and address is None
    output, kept = (
        (Path(config.output) / config.name, config.checkpoint.keep + 1) if config else (Path(), 0)
    )
    wanted = total(bundles(config)).get("GPU", 0.0) if config and alone else 0.0
    store = (
        store_wanted(config, model.parameters if model else 0) if config and alone else OBJECT_STORE
    )
    tested = software.fitting_set()
    # in the order in which they would stop a run: its start, its cluster, its places, its memory
    return {
        "python": partial(
            software.python, ".".join(map(str, sys.version_info[:3])), *software.python_versions()
        ),
        "packages": partial(
            software.packages, software.pins(tested), software.supported_packages(), file=tested
        ),
        "configuration": partial(configuration, config),
        "ray address": partial(network.ray_address, address),
        "token": partial(network.token, environment, token_file, Path.home()),
        "proxies": partial(network.proxies, environment, internal),
        "ports": partial(network.ports, ports),
        "dashboard": partial(network.dashboards, {network.DASHBOARD, *ports}, address, node),
        "gpus": partial(machine.gpus, wanted, software.installed_version("torch"), environment),
        "cores": partial(machine.cores, cores(), environment),
        "open files": partial(machine.open_files, *open_files()),
        "temporary folder": partial(machine.temporary, Path(tempfile.gettempdir()), store),
        "shared memory": partial(machine.shared_memory, SHARED_MEMORY, store),
        "memory": partial(
            machine.memory, tensor_bytes(config, model) if config and alone and model else 0
        ),
        "disk": partial(
            machine.disk,
            output,
            checkpoint_bytes(config, model) if config and model else None,
            kept,
        ),
        "sandbox": partial(software.sandbox),
        "browser": partial(software.browser),
        "desktop": partial(software.desktop),
        "scheduler": partial(software.scheduler, environment),
    }


async def examine(
    checks: Mapping[str, Callable[[], list[Finding]]], deadline: float = DEADLINE
) -> dict[str, list[Finding]]:
    """All checks at once.

    One that fails or takes longer than ``deadline`` seconds is an error of its own.
    """

    async def one(check: Callable[[], list[Finding]]) -> list[Finding]:
        try:
            return await in_thread(check, timeout=deadline)
        except DeadlineExceeded as error:
            remedy = "look at what it looks at by hand: a network file system or a command hangs"
            return [Finding("error", f"the check gave {error}", remedy)]
        except Exception as error:
            remedy = (
                "see the message; if nothing is wrong with this machine, it is an error of doctor"
            )
            return [Finding("error", f"the check failed: {type(error).__name__}: {error}", remedy)]

    return dict(zip(checks, await asyncio.gather(*map(one, checks.values())), strict=True))


def text(found: Mapping[str, list[Finding]]) -> str:
    """One line per finding, a second one with its remedy, and a summary."""
    width, lines = max(map(len, found)), []
    for name, findings in found.items():
        for finding in findings:
            lines.append(f"{finding.level:<8} {name:<{width}}  {finding.found}")
            lines += [f"{'':<8} {'':<{width}}  -> {finding.remedy}"] if finding.remedy else []
    levels = [finding.level for findings in found.values() for finding in findings]
    return "\n".join(
        [
            *lines,
            "",
            (
                f"{counted(levels.count('error'), 'error')},"
                f" {counted(levels.count('warning'), 'warning')}"
            ),
        ]
    )


def configuration(config: RunConfig | None) -> list[Finding]:
    """The files and packages that CONFIG names are there: error."""
    if config is None:
        return [Finding("ok", "no CONFIG given")]
    try:
        preflight(config)
        beyond = beyond_positions(config)
    except ConfigError as error:
        found, _, remedy = str(error).partition(". ")
        return [Finding("error", found, remedy or "correct the file")]
    fine = [Finding("ok", f"run {config.name}: model, data and loggers are there")]
    for said in filter(None, (beyond, *idle_settings(config))):
        found, _, remedy = said.partition(". ")
        fine.append(Finding("warning", found, remedy))
    if (
        config.policy.engine.lora is not None
        and (model := shape(config)) is not None
        and experts(model.config)
    ):
        fine.append(
            Finding(
                "warning",
                f"policy.engine.lora: {UNADAPTED}",
                "leave policy.engine.lora out to train them",
            )
        )
    return fine


def shape(config: RunConfig) -> Shape | None:
    """Of the run's model; None where it cannot be known, which ``configuration`` says."""
    try:
        return read_shape(config.model.path, config.model.revision)
    except ConfigError:
        return None


def checkpoint_bytes(config: RunConfig, model: Shape) -> int:
    """Bytes of one checkpoint: what is trained and its optimizer state, in float32."""
    return FLOAT * model.trained(config.policy.engine) * 3


def tensor_bytes(config: RunConfig, model: Shape) -> int:
    """Bytes of main memory for the tensors of all roles, where those on GPUs keep copies: a lower
    bound, without activations.
    """
    weights, needed = model.parameters, 0
    if not config.policy.placement.num_gpus or config.policy.engine.cpu_offload:
        # What is saved, the frozen weights, and the gradients, which are as large as what is
        # trained.
        needed += checkpoint_bytes(config, model) + FLOAT * weights
    if config.policy.placement.num_gpus:
        # The first rank loads the whole model at the start and exports it later, and each engine of
        # vLLM's gets a copy.
        handed = config.rollout.actors if isinstance(config.engine, VllmEngineSettings) else 0
        exported = weights * (2 if config.policy.engine.dtype == "bfloat16" else FLOAT)
        needed += max(FLOAT * weights, exported * (1 + handed))
    if not config.rollout.placement.num_gpus and config.engine.holds_model:
        needed += (
            config.rollout.actors * weights * (2 if config.engine.dtype == "bfloat16" else FLOAT)
        )
    if config.reference_kind == "actor" and not config.reference.placement.num_gpus:
        needed += config.reference.actors * of_reference(config, model) * FLOAT
    return needed
