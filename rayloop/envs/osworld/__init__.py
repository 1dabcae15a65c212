"""OSWorld's machines as an environment.

Never exercised on a real machine: its tests use a stand-in of ``desktop-env`` 1.0.2.
"""
