"""A local X desktop for each episode, in a sandbox without network, with tasks that are checked on
the files they leave.
"""
