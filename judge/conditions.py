"""What verdicts depend on besides the settings, for the protocol of a number."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from rayloop.config.settings import local_path
from rayloop.core.failures import InfrastructureFailure
from rayloop.judge.calibrate import CALIBRATION
from rayloop.judge.client import ClientSettings, JudgeClient
from rayloop.judge.discovery import FileDiscovery
from rayloop.judge.prompt import PROMPT_VERSION
from rayloop.judge.rubric import Rubric
from rayloop.judge.rules.decision import RULES_VERSION

VERSION_TIMEOUT_S = 12.0
"""Seconds in which a judge must describe itself."""
FIGURES = ("count", "accuracy", "kappa", "attack_rate")
"""Figures of a calibration that are published."""


async def conditions(settings: ClientSettings, rubric: Rubric) -> dict[str, Any]:
    """Rubric, prompt and rules of verdicts, and the judge that answers now.

    Its figures are from the newest ``judge calibrate``, if that asked the same judge.
    """
    fingerprint = await _fingerprint(settings)
    return {
        "rubric": rubric.digest,
        "prompt": PROMPT_VERSION,
        "rules": RULES_VERSION,
        "fingerprint": fingerprint,
        "calibration": _figures(settings.discovery.options(), fingerprint),
    }


async def _fingerprint(settings: ClientSettings) -> str:
    client = JudgeClient(settings)
    try:
        async with asyncio.timeout(VERSION_TIMEOUT_S):
            return (await client.version()).fingerprint
    except (InfrastructureFailure, TimeoutError):
        return "no judge answered"
    finally:
        await client.close()


def _figures(place: Any, fingerprint: str) -> dict[str, str]:
    """The figures over all items of this judge's newest calibration; empty without one."""
    if not isinstance(place, FileDiscovery.Settings):
        return {}
    # ``judge calibrate`` writes next to the file in which a judge announces itself.
    file = local_path(place.path).with_name(CALIBRATION)
    with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
        report = json.loads(file.read_text(encoding="utf-8"))
        if report["fingerprint"] == fingerprint:
            # As texts: a share of no items is not a number.
            return {name: f"{report['scores'][-1][name]:.4g}" for name in FIGURES}
    return {}
