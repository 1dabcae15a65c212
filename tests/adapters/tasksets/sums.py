"""A task set of verifiers 0.4 with three kinds of environment, for a Python that has the package."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumTask(vf.Task):
    """Right is the sum, as the last number; a tenth for any number."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.name)

    @vf.reward(weight=0.5)
    async def spoke(self, trace: vf.Trace) -> float:
        return 1.0


class Sums(vf.Taskset):
    """What is i + 1?"""

    def load(self):
        for i in range(10):
            yield SumTask(
                vf.TaskData(prompt=f"What is {i} + 1?", name=str(i + 1)), self.config.task
            )
