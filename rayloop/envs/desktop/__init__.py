"""A local X desktop for each episode, in a sandbox without network.

Its tasks are checked on the files that they leave.
"""
