"""An engine that sleeps as vLLM's does on a GPU, on a CPU."""

from __future__ import annotations

from rayloop.config.settings import SettingsModel
from rayloop.core.protocols import Level
from rayloop.engines.generation.transformers import TransformersEngine
from rayloop.engines.settings import EnginePlace, ModelSettings, TransformersEngineSettings


class SleepyEngine(TransformersEngine):
    """It fails when it is asked for a turn while it sleeps; after level2 it has no weights."""

    class Settings(SettingsModel):
        sleep: Level = "level1"

    def __init__(self, model: ModelSettings, settings: Settings, place: EnginePlace) -> None:
        super().__init__(model, TransformersEngineSettings(threads=1), place)
        self.asleep = False

    async def sleep(self, level: Level) -> None:
        assert self._idle.is_set(), "it was paused before"
        self.asleep = True
        if level == "level2":
            self._version = None
            for tensor in self._parameters.values():
                tensor.zero_()

    async def wake_up(self) -> None:
        self.asleep = False

    async def resume(self) -> None:
        assert not self.asleep, "a sleeping engine must not decode"
        await super().resume()
