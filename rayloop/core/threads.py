"""Calls of foreign, blocking code with a deadline: in a daemon thread for each call, which neither
exhausts a pool nor keeps the process from exiting, or (``CallLoop``) in one thread for all calls of
an object and its coroutines.
"""

import asyncio
import inspect
import re
import threading
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from rayloop.core.failures import DeadlineExceeded

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *args: object, timeout: float) -> Result:
    """Run ``function(*args)`` in a thread for at most ``timeout`` seconds.

    Raises DeadlineExceeded (the thread is abandoned), or what ``function`` raises: SystemExit and
    StopIteration as RuntimeError.
    """
    answer = asked()
    return await within(timeout, answer, start(lambda: settle(answer, lambda: function(*args))))


def complete(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run the coroutine to its end.

    Where this thread runs an event loop already, as in a notebook, another thread runs it; what
    interrupts this one cancels it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    running = list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]()

    async def known() -> Result:
        if (task := asyncio.current_task()) is not None:
            running.append((asyncio.get_running_loop(), task))
        return await coroutine

    with ThreadPoolExecutor(1, "rayloop-loop") as pool:
        future = pool.submit(asyncio.run, known())
        try:
            return future.result()
        except KeyboardInterrupt:
            for loop, task in running:
                # The interrupt reached this thread alone; the coroutine runs in another one.
                loop.call_soon_threadsafe(task.cancel)
            raise


def call_within(
    timeout: float, function: Callable[..., Result], /, *args: object, **options: object
) -> Result:
    """Run ``function`` in a thread, waited for by this one for at most ``timeout`` seconds.

    Raises as ``in_thread``.
    """
    answer = asked()
    thread = start(lambda: settle(answer, lambda: function(*args, **options)))
    if not wait({answer}, timeout).done:
        raise _given_up(thread, timeout)
    result: Result = answer.result()
    return result


HUNG = 8
"""Calls that may hang in one actor before it is replaced, which counts against no budget: each
holds its memory, and may spin.
"""
_abandoned: set[threading.Thread] = set()


def hanging() -> int:
    """The number of threads that were given up at their deadline and still run.

    Only the process's end ends them.
    """
    _abandoned.difference_update([thread for thread in _abandoned if not thread.is_alive()])
    return len(_abandoned)


def start(work: Callable[[], None]) -> threading.Thread:
    """A thread that does not keep the process from exiting."""
    thread = threading.Thread(target=work, daemon=True, name="rayloop-call")
    thread.start()
    return thread


def asked() -> Future[Any]:
    """An answer that a thread will give: who waits for it can give up, not cancel."""
    answer: Future[Any] = Future()
    # A future in this state cannot be cancelled, so that ``settle`` never finds it cancelled.
    answer.set_running_or_notify_cancel()
    return answer


def settle(answer: Future[Any], work: Callable[[], Any]) -> None:
    """Give ``answer`` what ``contained(work)`` returns or raises, here and now."""
    try:
        answer.set_result(contained(work))
    except Exception as error:
        answer.set_exception(error)


def contained(work: Callable[[], Result]) -> Result:
    """What ``work()`` returns or raises; an exception that is no ``Exception`` (SystemExit), and
    StopIteration, as RuntimeError.
    """
    try:
        return work()
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        # SystemExit would end the thread without an answer,
        # and a coroutine cannot raise StopIteration.
        raise RuntimeError(f"raised {type(error).__name__}: {error}") from error


async def within(timeout: float, answer: Future[Any], thread: threading.Thread) -> Any:
    """Await the answer of ``thread`` for at most ``timeout`` seconds; others may wait for it too.

    Raises as ``in_thread``.
    """
    if answer.done():
        return answer.result()
    future = asyncio.wrap_future(answer)
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout)
    finally:
        future.cancel()  # nobody waits any more, or nothing is left to cancel
    if not done:
        raise _given_up(thread, timeout)
    return future.result()


def _given_up(thread: threading.Thread, timeout: float) -> DeadlineExceeded:
    _abandoned.add(thread)
    return DeadlineExceeded(f"no answer within {timeout:g} seconds")


_Call = tuple[Future[Any], Callable[[], Any]]


class CallLoop:
    """Carries out the calls that other threads ``put`` in the thread that is in ``run``, one by
    one. Coroutines run on one event loop, which goes on between calls; plain functions are never
    called while it runs (Playwright refuses that).
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._runner: asyncio.Runner | None = None
        self._filled = asyncio.Event()

    def put(self, function: Callable[[], Any]) -> Future[Any]:
        """Returns at once; the future gets what ``function`` returns or raises, as of
        ``in_thread``.
        """
        answer = asked()
        self._enqueue((answer, function))
        return answer

    def stop(self) -> None:
        """``run`` returns when it has carried out what was put before."""
        self._enqueue(None)

    def run(self) -> None:
        """Carry out calls until ``stop``; then what is left on the event loop is cancelled.

        May be called again.
        """
        try:
            while (call := self._next()) is not None:
                self._carry_out(*call)
                del call  # what it returned belongs to who asked
        finally:
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.close()

    def _enqueue(self, call: _Call | None) -> None:
        self._calls.put(call)
        if (runner := self._runner) is not None:
            with suppress(RuntimeError):  # it is closed: nobody will look
                runner.get_loop().call_soon_threadsafe(self._filled.set)

    def _next(self) -> _Call | None:
        if self._runner is not None:
            self._runner.run(self._wait())
        return self._calls.get()

    async def _wait(self) -> None:
        while self._calls.empty():
            # It is cleared before the second look: a call
            # that is put between the two sets it again.
            self._filled.clear()
            if self._calls.empty():
                await self._filled.wait()

    def _carry_out(self, answer: Future[Any], function: Callable[[], Any]) -> None:
        settle(answer, lambda: self._complete(function()))

    def _complete(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        if self._runner is None:
            runner = asyncio.Runner()
            runner.get_loop()  # made here, before another thread asks for it
            self._filled, self._runner = asyncio.Event(), runner
        return self._runner.run(_awaited(result))


class OwnerThread:
    """A daemon thread that carries out calls until ``end``."""

    def __init__(self) -> None:
        self._calls = CallLoop()
        self._thread = start(self._calls.run)

    async def call(self, function: Callable[..., Any], *args: object, timeout: float) -> Any:
        """``function(*args)``, awaited too when that is a coroutine.

        Raises as ``in_thread`` does.
        """
        return await within(timeout, self._calls.put(lambda: function(*args)), self._thread)

    def put(self, function: Callable[[], Any]) -> None:
        """Called when all that was asked for before has returned, if ever; nobody waits for it."""
        self._calls.put(function)

    def end(self) -> None:
        """The thread ends when all that was asked for before has returned."""
        self._calls.stop()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


PLUMBING = (
    "rayloop/config/settings.py",
    "rayloop/rewards/functions.py",
    "rayloop/core/threads.py",
    "rayloop/envs/episode.py",
    "rayloop/envs/instance.py",
    "rayloop/envs/worker.py",
    "actors/reward.py",
    "cluster/stages/trial.py",
)
"""Files whose frames stand above a person's own code in a traceback, and say nothing about it."""
_FRAMES = re.compile(
    rf'^  File "[^"]*({"|".join(map(re.escape, PLUMBING))})".*\n(    .*\n)*', re.MULTILINE
)


def own_frames(error: BaseException) -> str:
    """The traceback without the frames of what called a person's code, and without what was being
    handled meanwhile.
    """
    return _FRAMES.sub("", "".join(traceback.format_exception(error, chain=False)).rstrip())


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Values by key, thread-safe.

    ``limit`` and ``size`` have one unit; keys ``in_use`` stay beyond the limit.
    """

    def __init__(
        self,
        limit: int,
        size: Callable[[V], int] = lambda value: 1,
        in_use: Callable[[K], bool] = lambda key: False,
    ) -> None:
        self.used = 0
        self._limit, self._size, self._in_use = limit, size, in_use
        self._values: OrderedDict[K, V] = OrderedDict()
        self._making: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value, which then is the most recently used one; None when there is none (any more)."""
        with self._lock:
            if (value := self._values.get(key)) is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Keep a value, in the place of an earlier one of this key.

        One that is larger than the limit is not kept.
        """
        with self._lock:
            if (old := self._values.pop(key, None)) is not None:
                self.used -= self._size(old)
            self._values[key] = value
            self.used += self._size(value)
            self._shrink()

    def shrink(self) -> None:
        """Back to the limit: keys may have been in use when something was put, and are no more."""
        with self._lock:
            self._shrink()

    def clear(self) -> None:
        """Forget everything; what is being made is kept once it is there."""
        with self._lock:
            self._values.clear()
            self.used = 0

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value, made now if there is none; threads that ask meanwhile wait for it.

        Raises what ``make`` raises.
        """
        if (value := self.get(key)) is not None:
            return value
        with self._lock:
            # One thread makes the value; the lock is not
            # held meanwhile, since making may take seconds.
            ours = key not in self._making
            answer = self._making.setdefault(key, Future())
        if ours:
            try:
                value = make()
                self.put(key, value)
                answer.set_result(value)
            except BaseException as error:
                answer.set_exception(error)
            finally:
                # It is removed in any case, so that the next caller tries a failure again.
                del self._making[key]
        return answer.result()

    def _shrink(self) -> None:
        gone = []
        for key, value in self._values.items():
            if self.used <= self._limit:
                break
            if not self._in_use(key):
                gone.append(key)
                self.used -= self._size(value)
        # They are collected first: a dictionary must not change while it is iterated.
        for key in gone:
            del self._values[key]
