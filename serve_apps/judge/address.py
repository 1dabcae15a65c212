"""The judge's address for runs in its own Ray cluster.

A named actor has it, and ends with ``judge serve``.
"""

from typing import Any

import ray

from rayloop.config.settings import SettingsModel
from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.judge.discovery import Address

NAMESPACE = "rayloop"


class JudgeAddress:
    """The actor that holds the address."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def get(self) -> Address:
        """The address."""
        return self._address


def unclaimed(name: str) -> None:
    """Raises ConfigError when a judge of this name is served in this Ray cluster."""
    try:
        ray.get_actor(f"judge-{name}", namespace=NAMESPACE)
    except ValueError:
        return
    raise ConfigError(
        f"a judge named {name} is served in this Ray cluster already. Use it (url: auto), or end"
        " its `judge serve`"
    )


def announce_in_ray(name: str, address: Address) -> Any:
    """Start the actor. The address is withdrawn when the returned handle or this process ends."""
    actor_class = ray.remote(JudgeAddress)
    options = {"name": f"judge-{name}", "namespace": NAMESPACE, "num_cpus": 0}
    return actor_class.options(**options).remote(address)


class RayDiscovery:
    """Finds a judge that is served in the run's own cluster."""

    class Settings(SettingsModel):
        """The judge to find."""

        name: str = "judge"
        """The application's name in the judge's configuration."""

    def __init__(self, settings: Settings) -> None:
        self._name = settings.name

    async def __call__(self) -> Address:
        """The address. Raises InfrastructureFailure without one."""
        try:
            actor = ray.get_actor(f"judge-{self._name}", namespace=NAMESPACE)
            address: Address = await actor.get.remote()
            return address
        except (ValueError, ray.exceptions.RayError) as error:
            raise InfrastructureFailure(
                f"no judge named {self._name} is served in this Ray cluster"
            ) from error
