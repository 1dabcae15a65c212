"""The console: nothing is here yet.

What will be: a Ray Serve application that shows a run while it lives, from its folder. It may import rayloop/view (it reads a
run folder), rayloop/run (events, metrics) and the judge's application; no episodes, no recipe, and it starts no cluster.
"""
