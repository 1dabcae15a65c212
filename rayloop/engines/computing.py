"""What a process on a CPU was found to compute with fastest. No torch: the driver reads it, and tells those that come later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from rayloop.engines.settings import EngineChoice, FsdpSettings, ModelSettings, Threads, TransformersEngineSettings

S = TypeVar("S", EngineChoice, FsdpSettings)


@dataclass(frozen=True, slots=True)
class Computing:
    """``threads`` of a process, and ``kernels`` for people, the threads included; "" on a GPU."""

    threads: int
    kernels: str


def of(threads: int, *kernels: str) -> str:
    """For people: ``2 threads, mkl, sdpa attention``."""
    return ", ".join((f"{threads} thread{'s' if threads > 1 else ''}", *filter(None, kernels)))


def until_measured(model: ModelSettings, threads: Threads) -> ModelSettings:
    """``model`` as a process loads it: where its threads are still to be timed, so are its kernels, with these threads."""
    waits = threads == "auto" and model.kernels == "auto"
    return model.model_copy(update={"kernels": "torch"}) if waits else model


def measured(settings: S, threads: int | None) -> S:
    """Settings for a process that comes later: with the number of ``threads`` that was measured, unless none was, or it is set."""
    if threads is None or not isinstance(settings, FsdpSettings | TransformersEngineSettings):
        return settings
    return settings.model_copy(update={"threads": threads}) if settings.threads == "auto" else settings
