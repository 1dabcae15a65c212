"""Measurements of environments with real programs."""
