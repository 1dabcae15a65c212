"""A run before it starts: its configuration with the model that it names, and checks of both.

``train``, ``eval``, ``doctor`` and ``estimate`` begin with ``prepare``. The checks find failures
that can be known before anything is started: files, folders and packages that are missing. No
torch, no ray.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from rayloop.chat.rendering import Renderer
from rayloop.chat.template import CLOCK, template_source
from rayloop.chat.tokenizer import load_tokenizer, read_json
from rayloop.config.model import ModelSettings
from rayloop.config.settings import SettingsModel, check_components
from rayloop.core.failures import ConfigError
from rayloop.core.files import needed, write_whole
from rayloop.core.model_families import learned_positions, positions, unsupported
from rayloop.core.model_files import hashed
from rayloop.engines.settings import TransformersEngineSettings, VllmEngineSettings
from rayloop.engines.shape import ModelSource
from rayloop.envs.grammar.family import AUTO, listeners
from rayloop.envs.history.policies import shows_everything
from rayloop.grpo.idle import Situation, idle
from rayloop.launch.ray_variables import in_job
from rayloop.loggers.settings import installed
from rayloop.run.checkpoint import Checkpoint, complete
from rayloop.run.config import RunConfig
from rayloop.run.demand import store
from rayloop.run.held_out import never_evaluated, on_training_rows
from rayloop.run.sections import held_in

MAX_BIASED_TOKENS = 1024
"""Tokens that vLLM's runner on GPUs can keep from being sampled (v1/worker/gpu/sample/logit_bias.py
of 0.28 and 0.32).
"""
FILES = {
    "architecture": ("config.json",),
    "tokenizer": ("tokenizer.json",),
    "chat template": ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"),
    "image processor": ("preprocessor_config.json",),
}
"""Files of the model folder ``model.path``, by what they decide."""
LANGUAGE_KEY = "environment.language"
TEMPLATE_TIME = "template_time"
"""The file of a folder that has the time which a chat template with the date in it shows there."""


@dataclass(frozen=True)
class Prepared:
    """A run's configuration, with what it names on this machine.

    The model is looked up when it is first needed, and once: the methods return the same model with
    a completed configuration.
    """

    config: RunConfig
    """What the user wrote, completed by ``speaking`` and ``begun``."""
    model: ModelSource
    """The model of ``model.path``: its folder (``files.folder``) and its shape."""

    @cached_property
    def identity(self) -> dict[str, str]:
        """Hashes of the files to which the configuration only points. Raises ConfigError.

        They are the model's files by what they decide, its weights, and the training rows.
        """
        files = self.model.files
        hashes = {
            name: hashed([files.folder / file for file in names]) for name, names in FILES.items()
        }
        hashes["weights"] = f"commit {files.commit}" if files.commit else hashed(files.weights)
        hashes["data.train"] = hashed([Path(self.config.data.train)])
        return hashes

    @property
    def store(self) -> int:
        """Bytes of a private cluster's object store, within the free shared memory.

        Raises ConfigError when the model's size is not known. An engine that keeps its own weights
        gets no updates, for which the store would need room.
        """
        parameters = 0 if self.config.engine.own_weights else self.model.shape.parameters
        return store(self.config.policy.engine.dtype, parameters)

    def with_sections(self, **sections: SettingsModel) -> Self:
        """The same run with other sections of its configuration."""
        return replace(self, config=self.config.model_copy(update=sections))

    def speaking(self) -> Self:
        """The run with the language of its model in all components that read turns.

        Its stop words end the policy's turns. Raises ConfigError when the model speaks another one
        than ``environment.language``; a run in which nothing reads turns stays as it is.
        """
        config = self.config
        if not listeners(config):
            return self
        # Most runs have no action language, and start without the modules that read one.
        from rayloop.envs.grammar.choice import Model, chosen, spoken
        from rayloop.envs.grammar.language import spoken_format

        described: dict[str, Any] = {}
        try:
            described = read_json(self.model.files.folder / "config.json")
        except ConfigError:
            # A named language does not need the model's description.
            if config.environment.language == AUTO:
                raise
        speaker = Model(self.model.path, described)
        language = chosen(config.environment.language, speaker, LANGUAGE_KEY)
        config = spoken(config, language, speaker, LANGUAGE_KEY)
        environment = config.environment.model_copy(update={"language": language})
        sampling = config.rollout.sampling
        stop_words = getattr(spoken_format(language), "stop", ())
        stop = tuple(dict.fromkeys((*sampling.stop, *stop_words)))
        rollout = config.rollout.model_copy(
            update={"sampling": sampling.model_copy(update={"stop": stop})}
        )
        speaking = replace(self, config=config)
        return speaking.with_sections(environment=environment, rollout=rollout)

    def begun(self, folder: Path, checkpoint: Checkpoint | None = None) -> Self:
        """The same with what a run in ``folder`` keeps from its beginning.

        These are the Hub's commit, of now or of the run to continue, as revision, and the time of
        the chat template (``dated``). Raises ConfigError, StorageFailed.
        """
        model = self.model
        then = checkpoint.about.get("config", {}).get("model", {}) if checkpoint else {}
        if not model.revision and then.get("revision") and then.get("path") == model.path:
            model = ModelSource(model.path, then["revision"])
        commit = model.files.commit
        settings = self.config.model
        if commit:
            settings = settings.model_copy(update={"revision": commit})
        settings = dated(settings, model.files.folder, folder, then)
        return replace(self.with_sections(model=settings), model=model)


def prepare(config: RunConfig) -> Prepared:
    """The run with its model, of which nothing has been looked up yet."""
    return Prepared(config, ModelSource(config.model.path, config.model.revision))


def dated(
    model: ModelSettings, source: Path, folder: Path, then: Mapping[str, Any]
) -> ModelSettings:
    """The same with the time that the chat template shows, if it shows any.

    ``source``: the model's folder. The time is that of the model ``then`` (as plain data), else of
    an earlier start in ``folder``, else of now, which ``folder`` keeps. So the members of a group,
    an evaluation and a resumed run get the same prompt. Raises ConfigError, StorageFailed.
    """
    variables = model.chat_template_kwargs
    file = folder / TEMPLATE_TIME
    if CLOCK in variables or CLOCK not in template_source(source):
        return model
    time = (then.get("chat_template_kwargs") or {}).get(CLOCK)
    with needed(file):
        if time is None and file.is_file():
            time = file.read_text(encoding="utf-8").strip()
        if time is None:
            time = datetime.now().isoformat(timespec="seconds")
        if not file.is_file():
            write_whole(file, f"{time}\n".encode())
    return model.model_copy(update={"chat_template_kwargs": {**variables, CLOCK: time}})


def preflight(
    prepared: Prepared, *, trains: bool = True, reads: Sequence[str] = ("train", "eval")
) -> Prepared:
    """The run with the language of its model.

    ``reads``: the files of ``data`` that are read. Raises ConfigError that names the key, what is
    not there, and what to do.
    """
    known(prepared.model)
    prepared = prepared.speaking()
    config = prepared.config
    check_components(config)
    if in_job():
        lasting(config.output)
    for key, path in ((f"data.{name}", getattr(config.data, name)) for name in reads):
        if path is not None and not Path(path).is_file():
            raise ConfigError(
                f"{key}: {path} is not a file (seen from {Path.cwd()}). It must be a file of rows"
                " (JSONL, JSON array, parquet); the recipe's README says how to get one. Set it"
                f" with {key}=FILE"
            )
    installed(config.loggers)
    held_in(config.environment)
    if trains:
        _trainable(prepared)
    # Raises for tokenizer and chat template.
    renderer = Renderer(config.model, folder=prepared.model.files.folder)
    bannable(config, len(renderer.banned_tokens))
    beyond_positions(prepared)
    return prepared


def _trainable(prepared: Prepared) -> None:
    config = prepared.config
    alike(prepared)
    described = read_json(prepared.model.files.folder / "config.json")
    if config.policy.loss.perception is not None and "vision_config" not in described:
        raise ConfigError(
            f"policy.loss.perception masks pictures, and {config.model.path} is a text-only model:"
            " leave it out"
        )
    reason = config.engine.untrainable()
    if reason:
        raise ConfigError(reason)
    every = config.evaluation.every
    if every and not config.data.eval:
        raise ConfigError(
            f"evaluation.every is {every}, but data.eval names no rows. Set data.eval=FILE, or"
            " evaluation.every=0"
        )
    resume = config.checkpoint.resume
    if config.checkpoint.named and complete(Path(resume)) is None:
        what = "holds no complete checkpoint" if Path(resume).is_dir() else "is not a folder"
        raise ConfigError(
            f"checkpoint.resume: {resume} {what}. Name a folder runs/NAME/checkpoints/step_N, or"
            " use auto or never"
        )


def known(model: ModelSource) -> None:
    """Raises ConfigError unless the model exists and can be trained.

    It is a folder, or one of the Hub that can be downloaded.
    """
    described = read_json(model.files.folder / "config.json")
    text = described.get("text_config") or described
    kind = described.get("model_type", "")
    is_quantised = "quantization_config" in described
    reason = unsupported(kind, "vision_config" in described, text, is_quantised)
    if reason:
        raise ConfigError(f"{model.key}: {model.path}: {reason}")


def beyond_positions(prepared: Prepared) -> str:
    """A warning when episodes may be longer than the model has positions.

    "" when they cannot be, or the model does not say how many it has. Raises ConfigError where
    positions are looked up in a table, which has no rows beyond its end.
    """
    config = prepared.config
    files = prepared.model.files
    described = read_json(files.folder / "config.json")
    limit = positions(described.get("text_config") or described)
    longest = max(_longest(config), _longest(config.in_evaluation) if config.data.eval else 0)
    if limit is None or longest <= limit:
        return ""
    warning = (
        f"model.path: {config.model.path} has {limit} positions (max_position_embeddings), and an"
        f" episode may have {longest} tokens. Set environment.episode.max_tokens, and"
        " max_prompt_tokens below it, to what the model can read"
    )
    if files.whole and learned_positions(files.stored()):
        raise ConfigError(warning)
    return warning


def _longest(config: RunConfig) -> int:
    """Tokens of the longest episode that the settings allow."""
    episode = config.environment.episode
    one_turn = episode.max_prompt_tokens + config.rollout.sampling.max_tokens
    return one_turn if episode.max_turns == 1 else episode.max_tokens


def alike(prepared: Prepared) -> None:
    """Raises ConfigError unless the model of ``reference.path`` has the policy's tokens and images.

    With a server, the actors compare them.
    """
    path = prepared.config.reference.path
    if path is None or prepared.config.reference.server:
        return
    model = prepared.model
    reference = ModelSource(path, key="reference.path")
    known(reference)
    for what, read in {"tokenizer": _tokens, "cut of images": _cut}.items():
        mine = read(model.files.folder)
        other = read(reference.files.folder)
        keys = sorted({*mine, *other})
        first = next((item for item in keys if mine.get(item) != other.get(item)), None)
        if first is not None:
            raise ConfigError(
                f"reference.path: {path} has another {what} than model.path {model.path}: {first}"
                f" is {other.get(first)} there and {mine.get(first)} here. Name a model with the"
                f" same {what}"
            )


def _tokens(folder: Path) -> dict[Any, Any]:
    """Token -> its text, and whether it is special."""
    tokenizer = load_tokenizer(folder)
    special = {
        token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
    }
    return {
        token: (text, token in special)
        for text, token in tokenizer.get_vocab(with_added_tokens=True).items()
    }


def _cut(folder: Path) -> dict[Any, Any]:
    """What decides which tokens an image becomes; empty for a text-only model."""
    config = read_json(folder / "config.json")
    processor = read_json(folder / "preprocessor_config.json")
    vision = config.get("vision_config")
    if vision is None:
        return {}
    keys = {
        "patch_size": vision,
        "spatial_merge_size": vision,
        "temporal_patch_size": vision,
        "merge_size": processor,
    }
    return {
        "image_token_id": config.get("image_token_id"),
        **{key: where.get(key) for key, where in keys.items()},
    }


def idle_settings(config: RunConfig) -> list[str]:
    """A sentence for each setting of the algorithm that does nothing with this run's others.

    docs/idle_settings.md.
    """
    algorithm = config.algorithm
    environment = config.environment
    kinds = (environment.episode.environment, *environment.kinds.values())
    begins_again = not shows_everything(environment.history) or any(
        kind.agent_driven for kind in kinds
    )
    is_on_policy = algorithm.synchronous and algorithm.replay.kind != "corrected"
    computes_alike = isinstance(config.engine, TransformersEngineSettings) and not config.rounds
    situation = Situation(
        exact=is_on_policy and computes_alike and not config.policy.engine.drops_out,
        refresh_every=config.reference.refresh_every,
        longest=None if begins_again else environment.episode.max_tokens,
        most_entropy=math.log(
            config.rollout.sampling.sampling().effective_top_k
            or _vocabulary(config.model.path)
            or math.inf
        ),
    )
    return idle(config.policy.loss, algorithm, config.policy.update, situation)


def _vocabulary(model: str) -> int | None:
    """Tokens of the model, where its folder is here and says so."""
    described = read_json(Path(model) / "config.json")
    size = (described.get("text_config") or described).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def doubtful_settings(prepared: Prepared) -> list[str]:
    """The warnings about settings that are probably a mistake."""
    config = prepared.config
    warnings = (
        on_training_rows(config),
        never_evaluated(config),
        beyond_positions(prepared),
        *idle_settings(config),
    )
    return list(filter(None, warnings))


def bannable(config: RunConfig, banned: int) -> None:
    """Raises ConfigError for a model with more unsampled ids than vLLM can ban.

    These ids must not be sampled; vLLM's engine process would end.
    """
    on_gpu = config.rollout.placement.num_gpus > 0
    if (
        on_gpu
        and isinstance(config.rollout.engine, VllmEngineSettings)
        and banned > MAX_BIASED_TOKENS
    ):
        raise ConfigError(
            f"model.path: {config.model.path} has {banned} ids without a text, and vLLM can ban"
            f" {MAX_BIASED_TOKENS} on GPUs at most. Use rollout.engine.kind: transformers, or a"
            " model whose vocab_size is that of its tokenizer"
        )


def lasting(output: str) -> None:
    """Raises ConfigError when the run folder would be in the working directory of a job.

    That directory is deleted after the job.
    """
    if not Path(output).is_absolute():
        raise ConfigError(
            f"output: {output} is relative, and a Ray job's working directory is deleted"
            " when it ends. Name a folder that all nodes see: output=/shared/runs"
        )
