"""The start of an environment's process: a small process beside it ends both, and all they started, when the actor is gone.

That works too when the environment keeps the interpreter lock, is stopped, or is killed together with the actor. Imports nothing,
since the process beside is forked first.
"""

import os
import signal


def main(connection: int, lifeline: int) -> None:
    """Serve ``connection`` until the actor, which alone has the other end of ``lifeline``, is gone. In a session of its own.

    Both are numbers of open sockets.
    """
    for descriptor in (connection, lifeline):
        os.set_inheritable(descriptor, False)
    if os.fork() == 0:
        os.close(connection)
        os.read(lifeline, 1)  # nobody writes: it returns when the actor's end is closed
        os.killpg(0, signal.SIGKILL)
    os.close(lifeline)
    from rayloop.envs.worker import serve

    serve(connection)
