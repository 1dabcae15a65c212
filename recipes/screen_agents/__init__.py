"""Runs of the screen agents that were published in 2026, each beside its published values."""
