"""The start of an environment's process: a forked watcher ends it with the actor.

The watcher kills the process and all that it started. That also works when the environment holds
the interpreter lock or is stopped. Imports nothing, since it forks first.
"""

import os
import signal


def main(connection: int, lifeline: int) -> None:
    """Serve the socket ``connection`` until the actor has ended.

    Only the actor has the other end of the socket ``lifeline``.
    """
    # A program that the environment starts must hold neither open: no end would be noticed.
    for descriptor in (connection, lifeline):
        os.set_inheritable(descriptor, False)
    if os.fork() == 0:
        os.close(connection)
        # Nobody writes: it returns when the actor's end is closed.
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)
    os.close(lifeline)
    from rayloop.envs.worker import serve

    serve(connection)
