"""What can be known to fail before anything is started: files, folders and packages that the configuration names."""

import json
from collections.abc import Sequence
from pathlib import Path

from rayloop.chat.rendering import Renderer
from rayloop.core.failures import ConfigError
from rayloop.core.model_files import HUB_NAME, resolve, unsupported
from rayloop.engines.settings import VllmEngineSettings
from rayloop.launch.ray_variables import in_job
from rayloop.loggers.settings import installed
from rayloop.run.checkpoint import complete
from rayloop.run.config import RunConfig

BIASES = 1024
"""Tokens that vLLM's runner on GPUs can keep from being sampled (v1/worker/gpu/sample/logit_bias.py of 0.28 and 0.32)."""


def preflight(config: RunConfig, *, trains: bool = True, reads: Sequence[str] = ("train", "eval")) -> None:
    """Raises ConfigError that names the key, what is not there, and what to do. ``reads``: the files of ``data`` that are read."""
    if in_job():
        lasting(config)
    known(config)
    for key, path in ((f"data.{name}", getattr(config.data, name)) for name in reads):
        if path is not None and not Path(path).is_file():
            raise ConfigError(
                f"{key}: {path} is no file (seen from {Path.cwd()}). It must be a file of rows (JSONL, JSON array, parquet); the "
                f"recipe's README says how to get one. Set it with {key}=FILE"
            )
    installed(config.loggers)
    held_in(config)
    if trains:
        _trainable(config)
    bannable(config, len(Renderer(config.model).banned_tokens))  # raises for tokenizer and chat template


def _trainable(config: RunConfig) -> None:
    if why := config.engine.untrainable():
        raise ConfigError(why)
    if (every := config.evaluation.every) and not config.data.eval:
        raise ConfigError(f"evaluation.every is {every}, but data.eval names no rows. Set data.eval=FILE, or evaluation.every=0")
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and complete(Path(resume)) is None:
        what = "holds no complete checkpoint" if Path(resume).is_dir() else "is no folder"
        raise ConfigError(f"checkpoint.resume: {resume} {what}. Name a folder runs/NAME/checkpoints/step_N, or use auto or never")


def known(config: RunConfig) -> None:
    """Raises ConfigError unless the model is a folder, or one of the Hub that can be had, of a kind that can be trained."""
    model = config.model.path
    if not Path(model).is_dir() and (Path(model).parent.is_dir() or not HUB_NAME.fullmatch(model)):
        raise ConfigError(
            f"model.path: {model} is no folder. Make a model with `python -m rayloop sft`, or name a folder in Hugging Face "
            "layout or a model of the Hub (owner/name)"
        )
    file = resolve(model, config.model.revision).folder / "config.json"
    described = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text = described.get("text_config") or described
    if why := unsupported(described.get("model_type", ""), "vision_config" in described, text):
        raise ConfigError(f"model.path: {model}: {why}")


def held_in(config: RunConfig) -> str:
    """How the environments confine the policy's code, by ``preflight(settings)`` of their classes; empty when none runs any."""
    said = []
    for kind in (config.environment.episode.environment, *config.environment.kinds.values()):
        check, settings = getattr(kind.resolve(), "preflight", None), kind.settings_class()
        if check is not None and settings is not None:
            said.append(check(settings.model_validate(kind.with_)))
    return "; ".join(dict.fromkeys(filter(None, said)))


def bannable(config: RunConfig, banned: int) -> None:
    """Raises ConfigError for a model with more ids that must not be sampled than vLLM can ban: its engine process would end."""
    on_gpu = config.rollout.placement.num_gpus > 0
    if on_gpu and isinstance(config.rollout.engine, VllmEngineSettings) and banned > BIASES:
        raise ConfigError(
            f"model.path: {config.model.path} has {banned} ids without a text, and vLLM can ban {BIASES} on GPUs at "
            "most. Use rollout.engine.kind: transformers, or a model whose vocab_size is that of its tokenizer"
        )


def lasting(config: RunConfig) -> None:
    """A job's working directory is deleted after it: raises ConfigError when the run folder would be in there."""
    if not Path(config.output).is_absolute():
        raise ConfigError(
            f"output: {config.output} is relative, and a Ray job's working directory is deleted when it ends. Name a folder "
            "that all nodes see: output=/shared/runs"
        )
