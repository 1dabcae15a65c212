"""``estimate``: steps, tokens, time and memory of a run before it is started.

They are computed by arithmetic and from measured steps.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayloop.commands.arguments import add_run
from rayloop.core.failures import ConfigError, counted
from rayloop.estimate.memory import RoleMemory, card, memory, on_card, with_micro_batch
from rayloop.estimate.run import (
    as_json,
    has_steps,
    lengths,
    lines,
    measured,
    most_image_tokens,
    plan,
)
from rayloop.run.config import read
from rayloop.run.preflight import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``estimate``."""
    add_run(parser, "steps=1000")
    source = "a run whose steps are measured (default: its own, if there)"
    parser.add_argument("--from", dest="run_folder", type=Path, metavar="RUN", help=source)
    parser.add_argument(
        "--step-seconds", type=float, metavar="S", help="take this as the time of a step"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate. Returns 0; raises ConfigError."""
    prepared = prepare(read(arguments.config, arguments.overrides))
    config = prepared.config
    folder = arguments.run_folder or (config.folder if has_steps(config.folder) else None)
    measurement = measured(folder) if folder else None
    if measurement and not arguments.json:
        print(f"measured: {counted(measurement.steps, 'step')} of {folder}")
    estimate = plan(config, measurement, most_image_tokens(prepared), arguments.step_seconds)
    roles: list[RoleMemory] = []
    reason = ""
    try:
        shape = prepared.model.shape
        roles = memory(with_micro_batch(prepared).config, shape, lengths(estimate))
    except ConfigError as error:
        reason = str(error)
    except KeyError as error:
        reason = f"model.path: {config.model.path}: its config.json has no {error}"
    if arguments.json:
        described = [_described(role, roles) for role in roles]
        print(json.dumps({**as_json(estimate), "memory": described}))
        return 0
    print("\n".join(lines(estimate, measurement)))
    print("\n".join(_table(roles)) if roles else f"memory: unknown. {reason}")
    return 0


def _described(role: RoleMemory, roles: list[RoleMemory]) -> dict[str, Any]:
    """The memory of a role as plain data."""
    return {
        "role": role.name,
        "count": role.count,
        "gpus": role.gpus,
        "bytes": role.bytes,
        "gpu_bytes": sum(role.of_gpu.values()),
        "host_bytes": sum(role.of_host.values()),
        "card": card(role, roles) if role.gpus else None,
        **role.parts,
    }


def _verdict(role: RoleMemory, roles: list[RoleMemory]) -> str:
    """The smallest card that a role fits, in words; "" for a role without a GPU."""
    if not role.gpus:
        return ""
    smallest = card(role, roles)
    if not smallest:
        return "; FITS NO CARD: use more ranks or num_gpus"
    shared = "with what shares it, " if on_card(role, roles) > role.needed else ""
    fewer = ", which then decodes fewer sequences together" if role.spare else ""
    return f"; {shared}fits a card of {smallest} GB{fewer}"


def _table(roles: list[RoleMemory]) -> list[str]:
    lines = ["memory of each process, in GB:"]
    for role in roles:
        gpus = f" on {role.gpus:g} GPU" if role.gpus else ""
        places = {"GPU": role.of_gpu, "host": role.of_host}
        sums = "; ".join(
            f"{place} {_sum(parts)}" for place, parts in places.items() if any(parts.values())
        )
        lines.append(f"  {role.count} x {role.name}{gpus}: {sums}{_verdict(role, roles)}")
    return lines


def _sum(parts: Mapping[str, int]) -> str:
    """The sum of the parts in GB, with each of them."""
    summands = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
    return f"{sum(parts.values()) / 1e9:.2f} = {summands}"
