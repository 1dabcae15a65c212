"""Runs of the screen agents that were published in 2026, each with its published values."""
