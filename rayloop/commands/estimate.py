"""``estimate``: steps, tokens, time and memory of a run before it is started, by arithmetic and
from measured steps.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from rayloop.commands.arguments import add_run
from rayloop.core.failures import ConfigError, counted
from rayloop.estimate.memory import RoleMemory, card, memory, on_card, with_micro_batch
from rayloop.estimate.run import as_json, has_steps, lengths, lines, measured, plan
from rayloop.estimate.shape import read_shape
from rayloop.run.config import read


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
    config = read(arguments.config, arguments.overrides)
    own = Path(config.output) / config.name
    folder = arguments.run_folder or (own if has_steps(own) else None)
    found = measured(folder) if folder else None
    if found and not arguments.json:
        print(f"measured: {counted(found.steps, 'step')} of {folder}")
    made = plan(config, found, arguments.step_seconds)
    try:
        shape = read_shape(config.model.path, config.model.revision)
        roles = memory(with_micro_batch(config), shape, lengths(config, made))
        why = ""
    except ConfigError as error:
        roles, why = [], str(error)
    except KeyError as error:
        roles, why = [], f"model.path: {config.model.path}: its config.json has no {error}"
    if arguments.json:
        described = [
            {
                "role": r.name,
                "count": r.count,
                "gpus": r.gpus,
                "bytes": r.bytes,
                "gpu_bytes": sum(r.of_gpu.values()),
                "host_bytes": sum(r.of_host.values()),
                "card": card(r, roles) if r.gpus else None,
                **r.parts,
            }
            for r in roles
        ]
        print(json.dumps({**as_json(made), "memory": described}))
        return 0
    print("\n".join(lines(config, made, found)))
    print("\n".join(_table(roles)) if roles else f"memory: unknown. {why}")
    return 0


def _verdict(role: RoleMemory, roles: list[RoleMemory]) -> str:
    if not role.gpus:
        return ""
    fewer = ", which then decodes fewer sequences together" if role.spare else ""
    smallest, shared = (
        card(role, roles),
        "with what shares it, " if on_card(role, roles) > role.needed else "",
    )
    return (
        f"; {shared}fits a card of {smallest} GB{fewer}"
        if smallest
        else "; FITS NO CARD: use more ranks or num_gpus"
    )


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
    each = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
    return f"{sum(parts.values()) / 1e9:.2f} = {each}"
