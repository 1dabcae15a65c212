"""``python -m rayloop export``: a model folder that plain transformers loads.

It is made of a checkpoint of a run, or of adapters of peft.
"""

import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rayloop.config.settings import load
from rayloop.core.failures import ConfigError
from rayloop.core.model_files import ADAPTERS, Resolved, Stored, are_adapters, hashed, resolve
from rayloop.core.types import Version
from rayloop.run.checkpoint import Checkpoint, CheckpointStore, complete
from rayloop.run.config import RunConfig
from rayloop.run.place import from_start, started_in
from rayloop.run.protocols.model_card import write_card


def export(source: Path, out: Path, dtype: str) -> int:
    """Write ``source`` to ``out`` as a model folder, adapters merged, and return exit code 0.

    ``source``: a run folder, a checkpoint, a model folder or peft's adapters. ``dtype``: float32 or
    bfloat16 (half the size). Raises ConfigError (``out`` is not empty) and CheckpointError.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; name a new folder")
    if is_model(source):
        _copy(source, out, dtype)
    elif are_adapters(source):
        _merge(source, out, dtype)
    else:
        checkpoint = find_checkpoint(source)
        _export_checkpoint(checkpoint, out, dtype)
        write_card(checkpoint, out)
    print(f"wrote {out}")
    return 0


def is_model(folder: Path) -> bool:
    """Whether the folder holds a model in transformers' format."""
    return (folder / "config.json").is_file()


def find_checkpoint(source: Path) -> Checkpoint:
    """The newest checkpoint of the run folder ``source``, or ``source`` itself.

    Raises ConfigError without one.
    """
    checkpoint = complete(source)
    if checkpoint is None and (source / "checkpoints").is_dir():
        checkpoint = CheckpointStore(source / "checkpoints", keep=1).find("auto")
    if checkpoint is None:
        raise ConfigError(
            f"{source} is not a run folder with a complete checkpoint, a checkpoint, adapters, or"
            " a model folder"
        )
    return checkpoint


def recorded(file: Path) -> RunConfig:
    """The configuration that a run wrote into its folder.

    Raises ConfigError that names unknown keys.
    """
    try:
        return from_start(load(file, [], RunConfig), file.parent)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nIt was written by another version of rayloop. Remove the unknown keys from"
            f" {file}, or use that version"
        ) from error


def _export_checkpoint(checkpoint: Checkpoint, out: Path, dtype: str) -> None:
    """Load the trainer's state into an engine on one rank, and write its weights.

    The engine is like the run's.
    """
    from rayloop.engines.models.saving import save_model
    from rayloop.engines.training.fsdp import FsdpEngine

    run = checkpoint.folder.parents[1]
    config = recorded(run / "config.yaml")

    try:
        source = resolve(config.model.path, config.model.revision).folder
    except ConfigError as error:
        base = started_in(run)
        hint = "A relative path goes from the folder in which the run was started: export it there"
        if base is not None:
            hint = f"The run was started in {base}, and it is not there either"
        raise ConfigError(f"{error} (seen from {Path.cwd()}). {hint}") from error

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as meeting:
        engine = FsdpEngine(
            config.model,
            config.policy.engine,
            config.policy.optimizer,
            config.policy.loss,
            rank=0,
            world_size=1,
            init_method=f"file://{meeting}/store",
            seed=config.seed,
        )
        engine.load(checkpoint.trainer, checkpoint.sums)
        save_model(
            source,
            out,
            engine.export(Version(checkpoint.lineage, checkpoint.step)),
            dtype,
            limits=config.model,
        )
        engine.close()

    tint = config.model.position_tint
    if tint:
        print(
            "It was trained on pictures whose colours say where they are (model.position_tint:"
            f" {tint}); without them it answers worse: rayloop.data.images.tinted(data, {tint})"
            " makes them"
        )


def _copy(source: Path, out: Path, dtype: str) -> None:
    """The model folder ``source`` with its weights in another type.

    Raises ConfigError for one that lacks some.
    """
    from rayloop.engines.models.saving import save_model

    Resolved(source).refuse_two_models()
    stored = Resolved(source).stored()
    if not stored:
        raise ConfigError(f"{source} has no safetensors weights")
    save_model(source, out, _read(stored), dtype)


def _read(stored: Mapping[str, Stored]) -> dict[str, Any]:
    """The tensors, each from its file."""
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(file, "pt") as content:
            tensors |= {
                name: content.get_tensor(name)
                for name, tensor in stored.items()
                if tensor.file == file
            }
    return tensors


def _merge(source: Path, out: Path, dtype: str) -> None:
    """Write the base model of peft's adapters with them merged in.

    Raises ConfigError for adapters that do not fit their base.
    """
    from rayloop.engines.adapters import merge_adapters
    from rayloop.engines.models.saving import save_model

    merged = merge_adapters(source)
    save_model(merged.base, out, merged.tensors, dtype, config=merged.config)


def model_of(source: Path, kept: Path) -> Path:
    """``source`` when it is a model folder, else the folder of its export.

    Its checkpoint or adapters are exported to ``kept`` once. Raises as ``export``.
    """
    if is_model(source):
        return source
    if are_adapters(source):
        name = f"adapters-{hashed(source / file for file in ADAPTERS)}"
        write = partial(_merge, source)
    else:
        checkpoint = find_checkpoint(source)
        name = f"{checkpoint.folder.parents[1].name}-{checkpoint.folder.name}-{checkpoint.lineage}"
        write = partial(_export_checkpoint, checkpoint)

    target = kept / name
    if not is_model(target):
        shutil.rmtree(target, ignore_errors=True)
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept, ignore_cleanup_errors=True) as aside:
            write(Path(aside) / "model", "float32")
            # Renamed when it is whole: an interrupted export must not pass for a model.
            (Path(aside) / "model").rename(target)
    return target
