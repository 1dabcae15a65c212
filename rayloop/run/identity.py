"""Whether a checkpoint fits the run that wants to continue it, checked before anything starts.

No torch, no ray. The marker carries what ``about`` describes: schema version, hashes of the model's
files, the configuration.
"""

from collections.abc import Mapping
from typing import Any

from rayloop.config.yaml_source import flat
from rayloop.core.failures import ConfigError
from rayloop.run.checkpoint import Checkpoint
from rayloop.run.config import RunConfig

CHECKPOINT_SCHEMA_VERSION = 4
"""Schema version of the checkpoints that are written: of the marker's keys and the files' contents.

1: the driver's part was a pickle of classes (driver.pkl). 2: it is plain data. 3: so are the
trainer's index and random states. 4: eight keys of the driver's part have other names.
"""
READABLE_SCHEMA_VERSIONS = (2, 3, 4)
"""Schema versions of the checkpoints that can be read."""
_READ = f"{READABLE_SCHEMA_VERSIONS[0]} to {READABLE_SCHEMA_VERSIONS[-1]}"

FIXED = (
    "model.min_pixels",
    "model.max_pixels",
    "model.position_tint",
    "model.chat_template_kwargs.",
    "seed",
    "data.order",
    "policy.engine.train_vision",
    "policy.engine.lora.",
)
"""Keys that may not change within a run; with a dot at the end, all below, and whether there are
any.
"""
FREE = ("policy.engine.lora.dropout", "policy.engine.lora.targets", "policy.engine.lora.vision")
"""The keys in ``FIXED`` that may change all the same: dropout changes no weight's meaning, and only
older checkpoints have the others.
"""
UNREPORTED = ("checkpoint.resume",)
"""Keys that say how to start, not what the run is."""


class ResumeRefused(ConfigError):
    """The checkpoint was written by another run than the configuration describes.

    Nothing was touched.
    """


def about(config: RunConfig, hashes: Mapping[str, str], tasks: int) -> dict[str, Any]:
    """The description of the run in a checkpoint's marker.

    ``hashes``: ``Prepared.identity``; ``tasks``: their number in the run's data.
    """
    return {
        "schema": CHECKPOINT_SCHEMA_VERSION,
        "identity": dict(hashes),
        "tasks": tasks,
        "config": config.model_dump(mode="json", by_alias=True),
    }


def check(checkpoint: Checkpoint, config: RunConfig, hashes: Mapping[str, str]) -> None:
    """Raises ResumeRefused, in one sentence, unless ``config`` can continue from the checkpoint."""
    why = _misfit(checkpoint.about, config, hashes)
    if why is not None:
        raise ResumeRefused(
            f"{checkpoint.folder} cannot be continued: {why}, or start afresh with another name=..."
        )


def changes(
    checkpoint: Checkpoint, config: RunConfig, hashes: Mapping[str, str]
) -> dict[str, tuple[Any, Any]]:
    """Every value that differs from the checkpoint's, which fits: key -> (then, now).

    None where it does not exist.
    """
    then, now = _both(checkpoint.about, config)
    keys = [
        key for key in {**then, **now} if then.get(key) != now.get(key) and key not in UNREPORTED
    ]
    differences = {key: (then.get(key), now.get(key)) for key in keys}
    # Rows with another content are reported, and not refused: only their number must stay.
    rows = checkpoint.about["identity"]["data.train"], hashes["data.train"]
    if rows[0] == rows[1]:
        return differences
    return {**differences, "content of data.train": rows}


def _misfit(then: Mapping[str, Any], config: RunConfig, hashes: Mapping[str, str]) -> str | None:
    """Why, and what to do about it. ``then``: what the checkpoint says of its run."""
    if then.get("schema") not in READABLE_SCHEMA_VERSIONS:
        return _other_schema(then.get("schema", 0))
    for name, previous in then["identity"].items():
        unnamed = (
            config.model.path if name == "weights" and config.model.revision else None
        )  # a Hub's model without a commit
        if name != "data.train" and previous not in (hashes[name], unnamed):
            difference = "differ from those" if name == "weights" else "differs from that"
            return (
                f"it was trained from a model whose {name} {difference} of model.path"
                f" {config.model.path}. Name that model"
            )
    old, new = _both(then, config)
    for key in {**old, **new}:
        if old.get(key) != new.get(key) and _fixed(key):
            return f"{key} was {old.get(key)} and is {new.get(key)}. Set it back"
    tasks = len(config.data.rows(config.data.train, lambda failure: None))
    if tasks != then["tasks"]:  # also of the same file: another reader may leave out other rows
        return (
            f"data.train had {then['tasks']} usable rows and has {tasks}, which are visited in"
            " another order. Name the same rows"
        )
    return None


def _both(then: Mapping[str, Any], config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each value of a checkpoint and of now by dotted key.

    The keys of older checkpoints are translated.
    """
    old = flat(then["config"])
    new = flat(config.model_dump(mode="json", by_alias=True))
    if not old.pop("data.shuffle", True):
        old["data.order"] = "file"
    frozen = old.pop("policy.engine.freeze_vision", None)
    if frozen is not None:
        old["policy.engine.train_vision"] = (
            False if frozen else old.get("policy.engine.lora.vision") or None
        )
    if (
        "chat_template_kwargs" not in then["config"]["model"]
    ):  # older runs lack them, and showed the current date
        old |= {
            key: value for key, value in new.items() if key.startswith("model.chat_template_kwargs")
        }
    return old, new


def _other_schema(schema: int) -> str:
    if schema > CHECKPOINT_SCHEMA_VERSION:
        return (
            f"its schema is {schema}, of a newer version of rayloop; this one reads {_READ}. Update"
            " rayloop to continue it"
        )
    return (
        f"its schema is {schema or 'older than 1'} and this version of rayloop reads {_READ}."
        " Finish the run with the version that began it; or take its weights along (python -m"
        " rayloop export CHECKPOINT FOLDER, then model.path=FOLDER in a new run, whose optimizer,"
        " step and order of tasks start over)"
    )


def _fixed(key: str) -> bool:
    is_fixed = any(
        key == fixed or (fixed[-1] == "." and f"{key}.".startswith(fixed)) for fixed in FIXED
    )
    return is_fixed and key not in FREE
