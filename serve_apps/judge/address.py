"""Where the judge is, for runs in its own Ray cluster: a named actor that lives as long as ``judge serve`` does."""

from __future__ import annotations

from typing import Any

import ray

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.judge.discovery import Address

NAMESPACE = "rayloop"


class JudgeAddress:
    def __init__(self, address: Address) -> None:
        self._address = address

    async def get(self) -> Address:
        return self._address


def unclaimed(name: str) -> None:
    """Raises ConfigError when somebody serves a judge of this name in this Ray cluster."""
    try:
        ray.get_actor(f"judge-{name}", namespace=NAMESPACE)
    except ValueError:
        return
    raise ConfigError(f"a judge named {name} is served in this Ray cluster already. Use it (url: auto), or end its `judge serve`")


def publish(name: str, address: Address) -> Any:
    """Start the actor; the address is withdrawn when its handle or this process goes."""
    return ray.remote(JudgeAddress).options(name=f"judge-{name}", namespace=NAMESPACE, num_cpus=0).remote(address)


class RayDiscovery:
    """``rayloop.judge.discovery`` for a judge that was started in the run's own cluster."""

    class Settings(SettingsModel):
        name: str = "judge"
        """The application's name in the judge's configuration."""

    def __init__(self, settings: RayDiscovery.Settings) -> None:
        self._name = settings.name

    async def __call__(self) -> Address:
        try:
            found: Address = await ray.get_actor(f"judge-{self._name}", namespace=NAMESPACE).get.remote()
            return found
        except (ValueError, ray.exceptions.RayError) as error:
            raise InfrastructureFailure(f"no judge named {self._name} is served in this Ray cluster") from error
