"""Running what a policy wrote without its reaching the run: Linux only, standard library only,
knows nothing of rayloop.
"""
