"""The same questions under a contract: an answer that is no JSON, or that the rubric cannot read,
makes verifiers' code raise.
"""

import json

import sums
import verifiers.v1 as vf

__all__ = ["Contract", "ContractSums"]


class ContractConfig(vf.EnvConfig):
    """One speaker."""

    player: vf.AgentConfig = vf.AgentConfig()


class Contract(vf.Env[ContractConfig]):
    """Raises on an answer that does not end with the contract's JSON, as environments with a
    proposer do.
    """

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            await talk.turn()
        said = talk.trace.last_reply
        if "down" in task.data.prompt:
            raise ConnectionError("the judge does not answer")
        try:
            json.loads(said)["sum"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"the player did not end with the JSON contract: {said[-40:]!r}"
            ) from error


class ContractTask(sums.SumTask):
    """Reads the contract again, and divides by what it says."""

    @vf.reward
    async def divided(self, trace: vf.Trace) -> float:
        return 1 / json.loads(trace.last_reply)["sum"]


class ContractSums(sums.Sums):
    """The last one's judge is away."""

    def load(self):
        for i in range(9):
            yield ContractTask(
                vf.TaskData(prompt=f"What is {i} + 1?", name=str(i + 1)), self.config.task
            )
        yield ContractTask(vf.TaskData(prompt="What is down + 1?", name="0"), self.config.task)
