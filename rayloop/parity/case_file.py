"""A case as a file: tokens, images and log-probs that another machine or trainer checks.

JSON without paths and without code. ``sha256`` is over everything but ``trainer_logprobs``, which
somebody's own trainer may add: one list of numbers per episode, for its sampled tokens in order.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rayloop.core.failures import ConfigError
from rayloop.core.files import write_whole
from rayloop.parity.play import Episode
from rayloop.parity.report import EngineOrigin

FILLED_IN = {"sha256", "trainer_logprobs"}
"""Keys that the hash leaves out."""


class CaseFile(BaseModel):
    """All episodes of a play, with the engine's log-probs in their turns."""

    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    format: Literal["rayloop parity case 1"] = "rayloop parity case 1"
    origin: EngineOrigin
    episodes: tuple[Episode, ...]
    trainer_logprobs: tuple[tuple[float, ...], ...] | None = None
    sha256: str = ""


def write_case(file: Path, case: CaseFile) -> None:
    """Write a case, all of it or nothing. Raises OSError."""
    content = json.loads(case.model_dump_json())
    content["sha256"] = digest(content)
    write_whole(file, json.dumps(content).encode())


def read_case(file: Path) -> CaseFile:
    """Read a case.

    Raises ConfigError for another file, and for one whose content was edited, OSError.
    """
    try:
        content = json.loads(file.read_bytes())
        case = CaseFile.model_validate_json(json.dumps(content))
    except ValueError as error:
        # pydantic's message has several lines.
        reason = " ".join(str(error).split())
        raise ConfigError(f"--check: {file} is not a case of --save: {reason}") from error
    if digest(content) != case.sha256:
        raise ConfigError(
            f"--check: {file} was edited: only trainer_logprobs may be filled in. Copy it again"
        )
    tokens = [episode.trajectory.sampled_tokens for episode in case.episodes]
    if case.trainer_logprobs is not None and tokens != [*map(len, case.trainer_logprobs)]:
        raise ConfigError(
            f"--check: {file}: trainer_logprobs needs a list for each of {len(tokens)} episodes, of"
            f" as many numbers as it has sampled tokens: {tokens}"
        )
    return case


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 over a case's JSON without the keys that are filled in."""
    covered = {name: content[name] for name in content if name not in FILLED_IN}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()
