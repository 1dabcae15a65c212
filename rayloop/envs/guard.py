"""The start of an environment's process: a forked watcher kills both, and all they started, when
the actor is gone. That also works when the environment holds the interpreter lock or is stopped.
Imports nothing, since it forks first.
"""

import os
import signal


def main(connection: int, lifeline: int) -> None:
    """Serve the socket ``connection`` until the actor, which alone has the other end of the socket
    ``lifeline``, is gone.
    """
    # A program that the environment starts must hold neither open: no end would be noticed.
    for descriptor in (connection, lifeline):
        os.set_inheritable(descriptor, False)
    if os.fork() == 0:
        os.close(connection)
        os.read(lifeline, 1)  # nobody writes: it returns when the actor's end is closed
        os.killpg(0, signal.SIGKILL)
    os.close(lifeline)
    from rayloop.envs.worker import serve

    serve(connection)
