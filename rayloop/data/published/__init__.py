"""Data sets as they are published: found on the Hub or in a folder, their columns mapped, split,
and written as rows of ours.
"""
