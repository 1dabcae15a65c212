"""Running code that a policy wrote, without access to the run.

Linux only, standard library only; the package imports nothing else of rayloop.
"""
