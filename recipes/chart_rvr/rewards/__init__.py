"""The rewards of Chart-RVR: ``ChartReward`` is what ``reward.source.use`` names."""

from recipes.chart_rvr.rewards.reward import ChartReward

__all__ = ["ChartReward"]
