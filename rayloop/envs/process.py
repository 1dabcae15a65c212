"""``isolation: process``: an environment in its own process (watchdog_fork.py, worker.py).

The process has its own session, and neither torch nor Ray. It is used again for other instances, is
killed with all that it started when a call hangs, and ends with its parent.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

from rayloop.core.failures import Cause, DeadlineExceeded, EnvironmentFailed
from rayloop.core.threads import in_thread, start
from rayloop.envs.settings import EnvironmentKind
from rayloop.sandbox.frames import Bounds, Channel

PICKLED = Bounds(1 << 10, 1, 1 << 34)
"""The bounds of a message: one pickle, of a call's arguments, or of what it returned or raised."""
EXIT_TIMEOUT_S = 5.0
"""Seconds in which a killed process must have ended."""
START = (
    "import sys; sys.path[:] = sys.argv[3:]; from rayloop.envs.watchdog_fork import main;"
    " main(int(sys.argv[1]), int(sys.argv[2]))"
)


class WorkerProcess:
    """A process that hosts one environment after the other."""

    def __init__(self) -> None:
        self._socket, worker_end = socket.socketpair()
        self._channel = Channel(self._socket, PICKLED)
        # The guard in the process watches this socket: its end closes when this process ends.
        self._lifeline, guard_end = socket.socketpair()
        with worker_end, guard_end:
            descriptors = (worker_end.fileno(), guard_end.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, *map(str, descriptors), *sys.path],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid

    async def ask(self, op: str, timeout: float, *arguments: object) -> tuple[bool, Any]:
        """Return whether the call succeeded, and what it returned or raised.

        A failure kills the process. Raises DeadlineExceeded, and EnvironmentFailed when the process
        has ended.
        """
        try:
            content = pickle.dumps(arguments)
            # The channel's deadline passes first, and so frees the thread.
            answer, [pickled] = await in_thread(
                self._channel.ask, op, timeout, [content], timeout=timeout + EXIT_TIMEOUT_S
            )
            return answer["succeeded"], pickle.loads(pickled)
        except TimeoutError as error:
            self.kill()
            raise DeadlineExceeded(str(error)) from error
        except ConnectionError as error:
            self.kill()
            raise EnvironmentFailed(await self._end(), cause=Cause.LOST) from error
        except BaseException:
            # The answer to a cancelled call would still come, and meet the next one.
            self.kill()
            raise

    def idle(self) -> bool:
        """Return whether it lives: the connection is open, and nothing came without a call."""
        self._socket.setblocking(False)
        with suppress(ConnectionError):
            try:
                self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return True
        return False

    def kill(self) -> None:
        """Kill the process with all that it started. Safe to call again."""
        if self._socket.fileno() == -1:
            return
        self._channel.close()
        self._lifeline.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # In a thread, since the event loop must not wait until it has died.
        start(self._reap)

    def _reap(self) -> None:
        """Wait for the process, and for what it had started.

        An actor is a subreaper: orphans become children of this process.
        """
        self._process.wait()
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-self.pid, 0)

    async def _end(self) -> str:
        """Say how the process ended."""
        try:
            code = await in_thread(self._process.wait, timeout=EXIT_TIMEOUT_S)
        except DeadlineExceeded:
            return "its process closed the connection"
        if code >= 0:
            return f"its process ended with exit code {code}"
        return f"its process was killed by {signal.Signals(-code).name}"


class IdleWorkers(list[WorkerProcess]):
    """Processes that wait for their next instance; the last one to come is taken first."""

    def take(self) -> tuple[WorkerProcess, bool]:
        """Return a process that seems to be alive and True, else a new one and False."""
        while self:
            worker = self.pop()
            if worker.idle():
                return worker, True
            worker.kill()
        return WorkerProcess(), False

    def end(self) -> None:
        """Kill all of them."""
        while self:
            self.pop().kill()


class InProcess:
    """An instance in its own process (``rayloop.envs.instance.Instance``)."""

    contained = True

    def __init__(self, kind: EnvironmentKind, workers: IdleWorkers) -> None:
        self.name = kind.name
        self._kind = kind
        self._workers = workers
        self._worker: WorkerProcess | None = None

    async def make(self, timeout: float) -> None:
        """Make it in an idle process, in another one when that is dying and does not answer."""
        while True:
            self._worker, used_before = self._workers.take()
            try:
                await self._ask("make", timeout, self._kind)
                return
            except EnvironmentFailed:
                # The constructor raised it, or ended a new process.
                if self._worker is not None or not used_before:
                    raise

    async def call(self, method: str, *args: object, timeout: float) -> Any:
        """Return what ``invoke`` returns in its process. Raises as ``Instance.call``."""
        return await self._ask("call", timeout, method, args)

    async def close(self, timeout: float) -> None:
        """Close the environment.

        Its process waits for the next one, unless calls of tools hang in it.
        """
        worker = self._worker
        self._worker = None
        if worker is None:
            return
        succeeded, value = await worker.ask("close", timeout)
        # The value is the number of threads in which calls of tools hang.
        if succeeded and value == 0:
            self._workers.append(worker)
            return
        worker.kill()
        if not succeeded:
            raise value

    async def _ask(self, op: str, timeout: float, *arguments: object) -> Any:
        """Call the process.

        Raises EnvironmentFailed when the process has ended already, else as ``WorkerProcess.ask``,
        and what the call raised.
        """
        worker = self._worker
        self._worker = None
        if worker is None:
            raise EnvironmentFailed("its process has ended", cause=Cause.LOST)
        succeeded, value = await worker.ask(op, timeout, *arguments)
        # Only after an answer: a call that failed or was cancelled has killed the process.
        self._worker = worker
        if succeeded:
            return value
        raise value
