"""The same questions with a tool that adds."""

import sums
import verifiers.v1 as vf

__all__ = ["ToolSums"]


class Adder(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """Adds."""

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class ToolSums(sums.Sums):
    """With ``add``."""

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Adder.run()
