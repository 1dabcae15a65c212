"""One file with a recorded step, which somebody else replays.

A zip archive with three members of fixed names. It is read in memory: nothing is unpacked, no path
in it is followed, and nothing in it is run.
"""

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import save

from rayloop.core.failures import CheckpointError, ConfigError
from rayloop.core.files import write_whole
from rayloop.rollout.step_record import RecordedStep, step_from_plain
from rayloop.run.folder import RunFolder
from rayloop.run.records import plain_files

BUNDLE_SCHEMA_VERSION = 1
ABOUT = "bundle.json"
STRUCTURE = "step.json"
TENSORS = "step.safetensors"
SIZE_LIMITS_BYTES = {ABOUT: 2**16, STRUCTURE: 2**26, TENSORS: 2**28}
"""Bytes of each member at most, unpacked: what opening a stranger's file may cost."""
SECRET_NAME = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
"""Names of environment variables whose values are in no bundle."""
SECRET_CHARACTERS = 8
"""Characters from which such a value is looked for: a shorter one may be any word."""
SETTING = re.compile(
    r"(^|_)(key|token|secret|password|url|host|port|address|file|folder|path)(_|$)"
)
"""Names of settings of a machine: left out when a bundle is written, and when it is read.

A stranger's judge could otherwise write its cache where the file says.
"""
REMOVED = "(removed)"


def plain_of(folder: RunFolder, step: int) -> Any:
    """What a run has on record of a step. Raises ConfigError, in one sentence."""
    structure, tensors = folder.rollouts.step_files(step)
    if not structure.is_file():
        kept = folder.rollouts.replayable()
        steps = f"Kept are the steps {_ranges(kept)}" if kept else "No step was"
        raise ConfigError(
            f"step {step} of {folder.path.name} was not kept for a replay: {structure.name}, with"
            f" its trajectories, log-probs and losses, is not in {folder.rollouts.path}. {steps};"
            " train with keep_rollouts=all"
        )
    try:
        return plain_files.read(structure, tensors)
    except CheckpointError as error:
        raise ConfigError(f"step {step} of {folder.path.name} is damaged: {error}") from error


def _ranges(steps: list[int]) -> str:
    if len(steps) > 2:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def write(folder: RunFolder, step: int, out: Path) -> str:
    """Write a step as one file; returns its SHA-256.

    Raises ConfigError for a step that is too large, or has a secret of this environment in it.
    """
    plain = _portable(plain_of(folder, step), _machine_paths(folder))
    plain["groups"] = _without_folders(plain["groups"])
    plain["config"] = _without_places(plain["config"])
    structure, arrays = plain_files.split(plain)
    contents = {STRUCTURE: json.dumps(structure).encode(), TENSORS: save(arrays)}
    about = {
        "schema": BUNDLE_SCHEMA_VERSION,
        "run": folder.path.name,
        "step": step,
        "sha256": {name: _sha256(content) for name, content in contents.items()},
    }
    contents[ABOUT] = json.dumps(about, indent=1).encode()
    for name, content in contents.items():
        if len(content) > SIZE_LIMITS_BYTES[name]:
            raise ConfigError(
                f"step {step}: {name} would have {len(content):,} bytes, and a bundle holds"
                f" {SIZE_LIMITS_BYTES[name]:,}; replay the run's folder itself"
            )
    _refuse_secrets(contents[STRUCTURE], step)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in SIZE_LIMITS_BYTES:
            # A ZipInfo of its own has no time and no user of this machine.
            archive.writestr(zipfile.ZipInfo(name), contents[name], zipfile.ZIP_DEFLATED)
    try:
        write_whole(out, buffer.getvalue())
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from error
    return _sha256(buffer.getvalue())


def read(path: Path) -> RecordedStep:
    """The step in a bundle. Raises ConfigError for another file, and for one that was changed."""
    try:
        size = path.stat().st_size
        if size > sum(SIZE_LIMITS_BYTES.values()):
            raise ConfigError(f"{path} has {size:,} bytes, more than a bundle may have")
        with zipfile.ZipFile(path) as archive:
            contents = dict(_contents(path, archive))
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{path} is not a bundle of rayloop: {error}") from error
    try:
        about = json.loads(contents[ABOUT])
        schema = about["schema"]
        sums = dict(about["sha256"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a bundle of rayloop: {ABOUT}: {error!r}") from error
    if schema != BUNDLE_SCHEMA_VERSION:
        raise ConfigError(
            f"{path} is a bundle of schema {schema!r}, and this version of rayloop reads"
            f" {BUNDLE_SCHEMA_VERSION}. Replay it with the version that wrote it"
        )
    for name in (STRUCTURE, TENSORS):
        if sums.get(name) != _sha256(contents[name]):
            raise ConfigError(
                f"{path} was changed: {name} has another SHA-256 than {ABOUT} says. Ask for the"
                " file again"
            )
    try:
        plain = plain_files.joined(contents[STRUCTURE], contents[TENSORS])
        plain["groups"] = _without_folders(plain["groups"])
        plain["config"] = _without_places(plain["config"])
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}") from error
    return step_from_plain(plain, str(path))


def _contents(path: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, bytes]]:
    """The members, none of them larger than it may be. Raises ConfigError."""
    names = [entry.filename for entry in archive.infolist()]
    if sorted(names) != sorted(SIZE_LIMITS_BYTES):
        odd = [name for name in names if name not in SIZE_LIMITS_BYTES] or names
        listed = ", ".join(map(repr, odd))[:200] or "nothing"
        raise ConfigError(
            f"{path} is not a bundle of rayloop: it has {listed}, and a bundle has"
            f" {', '.join(SIZE_LIMITS_BYTES)} alone"
        )
    for name, limit in SIZE_LIMITS_BYTES.items():
        # The size in the archive's own list may be a lie, so no more is read than is allowed.
        with archive.open(name) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ConfigError(f"{path}: {name} has more than {limit:,} bytes; it is not read")
        yield name, content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _machine_paths(folder: RunFolder) -> list[str]:
    """Folders of this machine that texts of a step may name, the longest first."""
    config = folder.configuration
    folders = {str(folder.path), str(folder.path.parent), str(Path.home()), os.getcwd()}
    folders |= {str(config.get("started_in") or ""), str(config.get("output") or "")}
    absolute = [name for name in folders if os.path.isabs(name) and name != os.sep]
    return sorted(absolute, key=len, reverse=True)


def _portable(value: Any, folders: list[str], name: str = "") -> Any:
    """Plain values without paths of this machine and tracebacks; ``name``: their key."""
    if isinstance(value, Mapping):
        return {key: _portable(part, folders, key) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(part, folders, name) for part in value]
    if not isinstance(value, str):
        return value
    if name == "trace":
        return ""
    # A column of a row may be a file or a folder; what the policy says, such as "/", is not.
    if name != "texts" and os.path.isabs(value) and os.path.exists(value):
        return os.path.basename(value)
    for folder in folders:
        value = re.sub(re.escape(folder) + r"(?![\w.-])", REMOVED, value)
    return value


def _without_folders(groups: Any) -> Any:
    """The groups, in which the path of an image is a name.

    ``--judge`` could otherwise show a judge any file that a stranger names.
    """
    if isinstance(groups, list):
        return [_without_folders(part) for part in groups]
    if not isinstance(groups, Mapping):
        return groups
    plain = {name: _without_folders(part) for name, part in groups.items()}
    if isinstance(plain.get("path"), str):
        plain["path"] = os.path.basename(plain["path"])
    return plain


def _without_places(config: Any) -> Any:
    """The configuration without settings that are addresses or files."""
    if isinstance(config, list):
        return [_without_places(part) for part in config]
    if not isinstance(config, Mapping):
        return config
    return {
        name: _without_places(value) for name, value in config.items() if not _is_place(name, value)
    }


def _is_place(name: str, value: Any) -> bool:
    if SETTING.search(name) is not None:
        return True
    return isinstance(value, str) and ("://" in value or os.path.isabs(value))


def _refuse_secrets(structure: bytes, step: int) -> None:
    """Raise ConfigError when the value of a secret environment variable is in the texts."""
    text = structure.decode()
    for name, value in os.environ.items():
        is_secret = SECRET_NAME.search(name) and len(value) >= SECRET_CHARACTERS
        if is_secret and not os.path.isabs(value) and json.dumps(value)[1:-1] in text:
            raise ConfigError(
                f"step {step} has the value of the environment variable {name} in its texts. No"
                " bundle was written"
            )
