"""The same questions in a talk of two turns."""

import sums
import verifiers.v1 as vf

__all__ = ["Talk", "TalkSums"]


class TalkConfig(vf.EnvConfig):
    """One speaker."""

    player: vf.AgentConfig = vf.AgentConfig()


class Talk(vf.Env[TalkConfig]):
    """Asks again after the first answer."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            await talk.turn()
            await talk.turn("Are you sure?")


class TalkSums(sums.Sums):
    """As ``Sums``."""
