"""The rollout actor: hosts a generation engine and keeps it on the published weights."""

from __future__ import annotations

import tempfile
from typing import Any

import ray

from actors.base import Actor
from rayloop.core.protocols import EngineHealth, GenerationEngine, Manifest
from rayloop.core.types import Completion, Sampling, TokenPrompt, Version
from rayloop.engines.settings import Dtype, GenerationSettings, ModelSettings
from rayloop.transports.choose import transport as choose
from rayloop.transports.object_store import Arrays, ArraySender
from rayloop.transports.seam import Publication
from rayloop.transports.settings import TransportSettings


def build_engine(model: ModelSettings, settings: GenerationSettings, folder: str) -> GenerationEngine:
    """The engine that ``settings.kind`` names. Its library is imported here, when chosen. ``folder`` is for publications."""
    match settings.kind:
        case "vllm":
            from rayloop.engines.generation.vllm import VllmEngine

            name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
            return VllmEngine(model, settings, scratch(), name)
        case "sglang":
            from rayloop.engines.generation.sglang import SglangEngine

            return SglangEngine(model, settings)
        case "openai_http":
            from rayloop.engines.generation.openai_http import OpenAiHttpEngine

            return OpenAiHttpEngine(model, settings, folder)
    from rayloop.engines.generation.transformers import TransformersEngine

    return TransformersEngine(model, settings)


def scratch() -> str:
    """A new folder within Ray's own, with which it goes: an actor that is killed cannot remove anything."""
    folder = ray.get_runtime_context().get_temp_dir() if ray.is_initialized() else None
    return tempfile.mkdtemp(prefix="rollout-", dir=folder)


def start_weights(model: ModelSettings, dtype: Dtype) -> Publication[Arrays]:
    """The weights of ``model.path`` as version 0.0, as ``ObjectStoreTransport`` sends them: for engines without a trainer."""
    from rayloop.engines.models import hf_state, load_model
    from rayloop.transports.manifest import DTYPES

    return ArraySender().pack(Version(0, 0), hf_state(load_model(model, dtype=DTYPES[dtype])))


class RolloutActor(Actor):
    """Many ``generate`` calls run at once on the actor's event loop; the engine batches them."""

    def __init__(
        self, model: ModelSettings, settings: GenerationSettings, transport: TransportSettings, folder: str
    ) -> None:
        self.engine = build_engine(model, settings, folder)
        self.receiver = choose(transport, folder).receiver()

    def health(self) -> EngineHealth:
        return self.engine.health()

    async def generate(self, prompt: TokenPrompt, sampling: Sampling) -> Completion:
        return await self.engine.generate(prompt, sampling)

    async def leave(self, cohort: str) -> None:
        await self.engine.leave(cohort)

    async def load(self, manifest: Manifest, source: Any) -> None:
        """Take over a publication, whose ``source`` only the transport understands. Raises PublicationError."""
        await self.receiver.take(self.engine, manifest, source)
