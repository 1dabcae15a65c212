"""The same questions as a game of two seats: the right answer wins 1, which the other seat loses."""

import sums
import verifiers.v1 as vf

__all__ = ["Duel", "DuelSums"]


class DuelConfig(vf.EnvConfig):
    """Two seats; the first one answers twice."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[DuelConfig]):
    """Nobody wins where both are right or both are wrong."""

    async def run(self, task, agents):
        seats = [
            vf.Task(task.data.model_copy(update={"prompt": f"{name}: {task.data.prompt}"}))
            for name in ("First", "Second")
        ]
        async with (
            agents.first.interaction(seats[0]) as first,
            agents.second.interaction(seats[1]) as second,
        ):
            await first.turn()
            await second.turn()
            await first.turn("Are you sure?")
        right = [talk.trace.last_reply.strip() == task.data.name for talk in (first, second)]
        for talk, ours, theirs in ((first, *right), (second, *reversed(right))):
            talk.trace.record_reward("won", float(ours) - float(theirs))


class DuelSums(sums.Sums):
    """As ``Sums``."""
