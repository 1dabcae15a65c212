"""The rewards of Chart-RVR: `reward.py` has `ChartReward`, which `reward.source.use` names."""
