"""``python -m rayloop export``: a checkpoint of a run as a model folder that plain transformers loads."""

import shutil
import tempfile
from pathlib import Path

from rayloop.config.settings import load
from rayloop.core.failures import ConfigError
from rayloop.core.model_files import resolve
from rayloop.core.types import Version
from rayloop.run.checkpoint import Checkpoint, CheckpointStore, complete
from rayloop.run.config import RunConfig


def export(source: Path, out: Path, dtype: str) -> int:
    """Write ``source`` (a run folder, a checkpoint or a model folder) to ``out``, adapters merged, and return exit code 0.
    ``dtype``: float32 or bfloat16 (half the size). Raises ConfigError (``out`` is not empty) and CheckpointError."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; name a new folder")
    if is_model(source):
        _copy(source, out, dtype)
    else:
        _export_checkpoint(find_checkpoint(source), out, dtype)
    print(f"wrote {out}")
    return 0


def is_model(folder: Path) -> bool:
    """Whether the folder holds a model in transformers' format."""
    return (folder / "config.json").is_file()


def find_checkpoint(source: Path) -> Checkpoint:
    """The newest checkpoint of the run folder ``source``, or ``source`` itself. Raises ConfigError without one."""
    found = complete(source)
    if found is None and (source / "checkpoints").is_dir():
        found = CheckpointStore(source / "checkpoints", keep=1).find("auto")
    if found is None:
        raise ConfigError(f"{source} is no run folder with a complete checkpoint, no checkpoint, and no model folder")
    return found


def recorded(file: Path) -> RunConfig:
    """The configuration that a run wrote into its folder. Raises ConfigError that names unknown keys."""
    try:
        return load(file, [], RunConfig)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nIt was written by another version of rayloop. Remove the unknown keys from {file}, or use that version"
        ) from error


def _export_checkpoint(checkpoint: Checkpoint, out: Path, dtype: str) -> None:
    """Load the trainer's state into an engine like the run's, on one rank, and write its weights."""
    from rayloop.engines.models import save_model
    from rayloop.engines.training.fsdp import FsdpEngine

    run = checkpoint.folder.parents[1]
    config = recorded(run / "config.yaml")
    with tempfile.TemporaryDirectory() as meeting:
        engine = FsdpEngine(
            config.model, config.policy.engine, config.policy.optimizer, config.policy.loss,
            rank=0, world_size=1, init_method=f"file://{meeting}/store", seed=config.seed,
        )  # fmt: skip
        engine.load(checkpoint.trainer, checkpoint.sums)
        source = resolve(config.model.path, config.model.revision).folder
        save_model(source, out, engine.export(Version(checkpoint.lineage, checkpoint.step)), dtype)
        engine.close()
    if tint := config.model.position_tint:
        print(
            f"It was trained on pictures whose colours say where they are (model.position_tint: {tint}); without them it answers "
            f"worse: rayloop.data.images.tinted(data, {tint}) makes them"
        )


def _copy(source: Path, out: Path, dtype: str) -> None:
    """The model folder ``source`` with its weights in another type."""
    from safetensors.torch import load_file

    from rayloop.engines.models import save_model

    weights = sorted(source.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"{source} has no safetensors weights")
    save_model(str(source), out, {name: t for file in weights for name, t in load_file(file).items()}, dtype)


def model_of(source: Path, kept: Path) -> Path:
    """``source`` itself when it is a model folder, else its checkpoint, exported to ``kept`` unless that was done before."""
    if is_model(source):
        return source
    checkpoint = find_checkpoint(source)
    target = kept / f"{checkpoint.folder.parents[1].name}-{checkpoint.folder.name}-{checkpoint.lineage}"
    if not is_model(target):
        shutil.rmtree(target, ignore_errors=True)
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as aside:
            _export_checkpoint(checkpoint, Path(aside) / "model", "float32")
            (Path(aside) / "model").rename(target)
    return target
