"""Probes for the first person with a GPU: what was written and never run there.

README.md says how.
"""
