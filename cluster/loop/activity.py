"""What a run is doing at this moment, for the console: the phase in plain words, and how far it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.driver import Driver

WORDS = {
    "start": "starting actors",
    "verify": "checking that engine and trainer agree",
    "gen": "generating",
    "update_actor": "training",
    "update_weights": "publishing weights",
    "testing": "evaluating",
    "save_checkpoint": "saving a checkpoint",
}
"""By the driver's phase, which is the name of its timing."""


def doing(driver: Driver) -> str:
    """One short line. While it generates: the trajectories that were played and scored, of those begun for this step."""
    words = WORDS.get(driver.phase, driver.phase)
    if driver.phase == "start":
        return f"{words} {driver.services.up}/{driver.services.wanted}"
    if driver.phase == "testing" and driver.player.evaluation is not None:
        done, asked = driver.player.evaluation
        return f"{words} {done}/{asked}"
    if driver.phase == "gen":
        production = driver.production
        begun = (len(production.in_flight) + len(production.finished)) * driver.config.algorithm.group_size
        return f"{words} {max(begun - driver.player.playing, 0)}/{begun}"
    return words
