"""Calls of foreign, blocking code with a deadline.

Each call has a daemon thread, which neither exhausts a pool nor keeps the process from exiting, or
(``CallLoop``) one thread makes all calls of an object and its coroutines.
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

    Where this thread runs an event loop already, for example in a notebook, another thread runs it;
    an interrupt of this thread cancels it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def registered() -> Result:
        task = asyncio.current_task()
        if task is not None:
            running.append((asyncio.get_running_loop(), task))
        return await coroutine

    with ThreadPoolExecutor(1, "rayloop-loop") as pool:
        future = pool.submit(asyncio.run, registered())
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
    """Run ``function`` in another thread, and wait for at most ``timeout`` seconds.

    Raises as ``in_thread``.
    """
    answer = asked()
    thread = start(lambda: settle(answer, lambda: function(*args, **options)))
    if not wait({answer}, timeout).done:
        raise _given_up(thread, timeout)
    result: Result = answer.result()
    return result


MAX_HUNG_CALLS = 8
"""Calls that may hang in one actor before it is replaced: each holds memory, and may spin.

The replacement counts against no budget.
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
    """An answer that a thread will give; a waiter can give up, but not cancel it."""
    answer: Future[Any] = Future()
    # A future in this state cannot be cancelled, so that ``settle`` never finds it cancelled.
    answer.set_running_or_notify_cancel()
    return answer


def settle(answer: Future[Any], work: Callable[[], Any]) -> None:
    """Run ``contained(work)`` in this thread, and give its result or exception to ``answer``."""
    try:
        answer.set_result(contained(work))
    except Exception as error:
        answer.set_exception(error)


def contained(work: Callable[[], Result]) -> Result:
    """The result of ``work()``, or its exception.

    StopIteration, and an exception that is not an ``Exception`` (SystemExit), become RuntimeError.
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
        finished, _ = await asyncio.wait({future}, timeout=timeout)
    finally:
        future.cancel()  # it has no effect on a future that is done
    if not finished:
        raise _given_up(thread, timeout)
    return future.result()


def _given_up(thread: threading.Thread, timeout: float) -> DeadlineExceeded:
    _abandoned.add(thread)
    return DeadlineExceeded(f"no answer within {timeout:g} seconds")


_Call = tuple[Future[Any], Callable[[], Any]]


class CallLoop:
    """Makes the calls that other threads ``put`` one by one, in the thread that is in ``run``.

    Coroutines run on one event loop, which continues between calls; plain functions are never
    called while it runs (Playwright refuses that).
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._runner: asyncio.Runner | None = None
        self._filled = asyncio.Event()

    def put(self, function: Callable[[], Any]) -> Future[Any]:
        """Return a future at once, which gets the result or exception as of ``in_thread``."""
        answer = asked()
        self._enqueue((answer, function))
        return answer

    def stop(self) -> None:
        """Let ``run`` return after the calls that were put before."""
        self._enqueue(None)

    def run(self) -> None:
        """Make calls until ``stop``; then cancel the tasks on the event loop.

        May be called again.
        """
        try:
            while True:
                call = self._next()
                if call is None:
                    return
                self._carry_out(*call)
                # Else the result would live here until the next call, however long that takes.
                del call
        finally:
            runner = self._runner
            self._runner = None
            if runner is not None:
                runner.close()

    def _enqueue(self, call: _Call | None) -> None:
        self._calls.put(call)
        # Read once: ``run`` may set it to None in its thread.
        runner = self._runner
        if runner is not None:
            with suppress(RuntimeError):  # it is closed, and nobody waits for the event
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
            # The loop is created here, before another thread gets it.
            runner.get_loop()
            self._filled = asyncio.Event()
            self._runner = runner
        return self._runner.run(_awaited(result))


class OwnerThread:
    """A daemon thread that makes calls until ``end``."""

    def __init__(self) -> None:
        self._calls = CallLoop()
        self._thread = start(self._calls.run)

    async def call(self, function: Callable[..., Any], *args: object, timeout: float) -> Any:
        """The result of ``function(*args)``, awaited when it is a coroutine.

        Raises as ``in_thread`` does.
        """
        return await within(timeout, self._calls.put(lambda: function(*args)), self._thread)

    def put(self, function: Callable[[], Any]) -> None:
        """Call a function after all earlier calls, if they return; nobody waits for it."""
        self._calls.put(function)

    def end(self) -> None:
        """End the thread after all earlier calls have returned."""
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
    "rayloop/rewards/scoring.py",
    "cluster/stages/dry_run.py",
)
"""Files whose frames precede the user's code in a traceback, and say nothing about it."""
_FRAMES = re.compile(
    rf'^  File "[^"]*({"|".join(map(re.escape, PLUMBING))})".*\n(    .*\n)*', re.MULTILINE
)


def own_frames(error: BaseException) -> str:
    """The traceback without the frames that called the user's code, and without earlier errors."""
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
        self._limit = limit
        self._size = size
        self._in_use = in_use
        self._values: OrderedDict[K, V] = OrderedDict()
        self._making: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used one; None when it is missing."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Keep a value, in the place of an earlier one of this key.

        A value that is larger than the limit is not kept.
        """
        with self._lock:
            former = self._values.pop(key, None)
            if former is not None:
                self.used -= self._size(former)
            self._values[key] = value
            self.used += self._size(value)
            self._shrink()

    def shrink(self) -> None:
        """Shrink to the limit, without the keys that were in use at the last ``put``."""
        with self._lock:
            self._shrink()

    def clear(self) -> None:
        """Forget all values; a value that is being made is kept afterwards."""
        with self._lock:
            self._values.clear()
            self.used = 0

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value, made now if it is missing; other threads that want it wait.

        Raises the exception of ``make``.
        """
        value = self.get(key)
        if value is not None:
            return value
        with self._lock:
            # One thread makes the value, without the lock, since making may take seconds.
            is_maker = key not in self._making
            answer = self._making.setdefault(key, Future())
        if is_maker:
            try:
                value = make()
                self.put(key, value)
                answer.set_result(value)
            except BaseException as error:
                answer.set_exception(error)
            finally:
                # It is removed in any case, so that the next caller retries after a failure.
                del self._making[key]
        return answer.result()

    def _shrink(self) -> None:
        evicted = []
        for key, value in self._values.items():
            if self.used <= self._limit:
                break
            if not self._in_use(key):
                evicted.append(key)
                self.used -= self._size(value)
        # They are collected first: a dictionary must not change while it is iterated.
        for key in evicted:
            del self._values[key]
