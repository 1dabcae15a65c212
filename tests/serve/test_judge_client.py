"""The judge's client against a judge on a real socket that fails in every way a judge can."""

from __future__ import annotations

import asyncio
import email.utils
import errno
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rayloop.core.failures import ConfigError, InfrastructureFailure
from rayloop.judge.api import JudgeItem, JudgeUnscored, JudgeVerdict, NoVerdict, Result
from rayloop.judge.client import ClientSettings, JudgeClient
from rayloop.judge.discovery import Address, FileDiscovery, announce, withdraw
from rayloop.judge.health import BreakerState
from rayloop.judge.transport import MAX_RETRY_AFTER_S, retry_after
from tests.support.judge_stub import (
    JudgeStub,
    Reply,
    body,
    content,
    reset,
    results,
    serving,
    slow,
    status,
    verdict,
)

FAST: dict[str, Any] = {
    "backoff": 0.01,
    "backoff_max": 0.05,
    "probe_interval": 0.05,
    "request_timeout": 5.0,
}


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeStub]:
    with serving(JudgeStub()) as running:
        yield running


@pytest.fixture
def stub(server: JudgeStub) -> JudgeStub:
    server.reset()
    return server


def item(answer: str = "red", reference: str = "red", **more: Any) -> JudgeItem:
    return JudgeItem(question="Which colour?", reference=reference, answer=answer, **more)


def using(url: str, use: Callable[[JudgeClient], Awaitable[Any]], **settings: Any) -> Any:
    """Run ``use`` with a client of that judge."""

    async def run() -> Any:
        client = JudgeClient(ClientSettings(**{"url": url, **FAST, **settings}))
        try:
            async with asyncio.timeout(30):
                return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def one(url: str, patience: float = 10.0, **settings: Any) -> Result:
    return using(url, lambda client: client.judge(item(), patience), **settings)


def test_a_verdict_arrives_as_it_was_given(stub: JudgeStub) -> None:
    result = one(stub.url)
    assert isinstance(result, JudgeVerdict)
    assert (result.verdict, result.score, result.fingerprint, result.cached) == (
        "correct",
        1.0,
        "stub-1",
        False,
    )
    wrong = using(stub.url, lambda client: client.judge(item("blue"), 5))
    assert isinstance(wrong, JudgeVerdict)
    assert (wrong.verdict, wrong.score) == ("incorrect", 0.0)


PASSING: dict[str, Reply] = {
    "404": status(404),  # Ray Serve before the application is there
    "429": status(429, retry_after="0"),
    "500": status(500),
    "502": status(502),
    "503": status(503),
    "reset": reset,
    "truncated body": content(b'{"results": [{"outcome"', length=4000),
    "half of a body": content(b'{"results": [{"outcome"'),
    "empty reply": content(b""),
    "a list": content(b"[]"),
    "other keys": content(b'{"verdict": "correct"}'),
    "too few results": content(b'{"results": []}'),
    "no JSON": content(b"<html>Bad gateway</html>"),
    "deep JSON": content(b"[" * 100_000),
    "deep results": content(b'{"results": ' + b"[" * 100_000),
}


@pytest.mark.parametrize("reply", PASSING.values(), ids=PASSING.keys())
def test_what_passes_is_waited_for(stub: JudgeStub, reply: Reply) -> None:
    stub.script = [reply, reply]
    result = one(stub.url)
    assert isinstance(result, JudgeVerdict), result
    assert stub.asked == ["red"] * 3


@pytest.mark.parametrize("reply", PASSING.values(), ids=PASSING.keys())
def test_what_does_not_pass_is_no_verdict(stub: JudgeStub, reply: Reply) -> None:
    stub.always = reply
    result = one(stub.url, patience=0.3)
    assert isinstance(result, JudgeUnscored)
    assert result.kind is NoVerdict.UNAVAILABLE
    assert stub.url in result.reason


INVALID: dict[str, Reply] = {
    "score 7": results(score=7),
    "NaN": results(score=float("nan")),
    "infinity": results(score=float("inf")),
    "a number as text": results(score="1"),
    "10/10 wrong": results(verdict="10/10 wrong"),
    "true": results(verdict=True),
    "unknown outcome": results(outcome="fine"),
    "null": content(b'{"results": [null]}'),
    "no fingerprint": results(fingerprint=""),
    "correct with 0": results(verdict="correct", score=0.0),
    "incorrect with 1": results(verdict="incorrect", score=1.0),
}


@pytest.mark.parametrize("reply", INVALID.values(), ids=INVALID.keys())
def test_a_reply_that_is_no_verdict_is_invalid(stub: JudgeStub, reply: Reply) -> None:
    stub.always = reply
    result = one(stub.url)
    assert isinstance(result, JudgeUnscored), result
    assert result.kind is NoVerdict.INVALID
    assert len(stub.requests) == 1


def test_an_invalid_result_does_not_spoil_its_batch(stub: JudgeStub) -> None:
    async def mixed(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Any) -> None:
        scores = [7 if one["answer"] == "blue" else 1 for one in items]
        found = [{**verdict(True, "stub-1"), "score": score} for score in scores]
        await body(send, 200, json.dumps({"results": found}).encode())

    stub.always = mixed
    answers = ["red", "blue", "green"]
    found = using(
        stub.url, lambda client: asyncio.gather(*(client.judge(item(a), 5) for a in answers))
    )
    assert [result.outcome for result in found] == ["scored", "unscored", "scored"]
    assert len(stub.requests) == 1


def test_a_slow_judge_is_a_timeout(stub: JudgeStub) -> None:
    stub.always = slow(30)
    result = one(stub.url, patience=0.2)
    assert isinstance(result, JudgeUnscored)
    assert result.kind is NoVerdict.TIMEOUT
    stub.always, stub.script = None, [slow(30)]
    assert isinstance(one(stub.url, request_timeout=0.2), JudgeVerdict)


def test_a_request_that_is_refused_is_not_repeated(stub: JudgeStub) -> None:
    stub.always = status(403)
    result = one(stub.url)
    assert isinstance(result, JudgeUnscored)
    assert "403" in result.reason
    assert len(stub.requests) == 1


def test_a_refused_batch_is_asked_item_by_item(stub: JudgeStub) -> None:
    stub.script = [status(413)]
    found = using(
        stub.url,
        lambda client: asyncio.gather(*(client.judge(item(a), 5) for a in ("red", "blue"))),
    )
    assert [result.verdict for result in found] == ["correct", "incorrect"]
    assert [len(request) for request in stub.requests] == [2, 1, 1]


def broken_by(*answers: str) -> Reply:
    """A judge that answers 500 to every request with one of these answers in it, and is right about
    all others.
    """

    async def reply(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Any) -> None:
        if any(one["answer"] in answers for one in items):
            return await body(send, 500, b"Internal Server Error")
        await stub.judge(items, send)

    return reply


def test_an_item_that_breaks_its_batch_is_left_alone(
    stub: JudgeStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are judged, the breaker stays closed, and the item has no verdict before anybody's
    patience is spent.
    """
    monkeypatch.setattr("rayloop.judge.client.MAX_ITEM_FAILURES", 3)
    stub.always = broken_by("poison")
    answers = ["red", *(f"shade {n}" for n in range(6)), "poison"]

    async def use(client: JudgeClient) -> list[Result]:
        return await asyncio.gather(*(client.judge(item(answer), 20) for answer in answers))

    *others, poison = using(stub.url, use, breaker_failures=3, concurrency=2)
    assert [result.verdict for result in others] == ["correct", *["incorrect"] * 6]
    assert isinstance(poison, JudgeUnscored)
    assert (poison.kind, "HTTP 500" in poison.reason) == (NoVerdict.INVALID, True)
    assert [len(request) for request in stub.requests[:2]] == [8, 8]
    assert sum(any(one["fresh"] for one in request) for request in stub.requests) == 1, (
        "one canary is enough for some seconds"
    )


def test_a_judge_that_fails_on_everything_is_not_the_items_doing(
    stub: JudgeStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayloop.judge.client.MAX_ITEM_FAILURES", 3)
    stub.always = status(500)

    async def use(client: JudgeClient) -> tuple[Result, BreakerState]:
        result = await client.judge(item(), 1.0)
        return result, client.breaker.state

    result, state = using(stub.url, use, breaker_failures=4)
    assert isinstance(result, JudgeUnscored)
    assert result.kind is NoVerdict.UNAVAILABLE
    assert state is not BreakerState.CLOSED


def test_who_asks_as_the_last_waiter_gives_up_is_not_cancelled(stub: JudgeStub) -> None:
    stub.always = slow(0.5)

    async def use(client: JudgeClient) -> list[Any]:
        waiting = asyncio.create_task(client.judge(item(), 5))
        while not stub.requests:
            await asyncio.sleep(0.01)
        (question,) = client._questions.values()
        # as the last waiter does; what was to be called then has not run yet
        question.future.cancel()
        late = await client.judge(item(), 5)
        return [late, *await asyncio.gather(waiting, return_exceptions=True)]

    late, _ = using(stub.url, use)
    assert isinstance(late, JudgeVerdict), late


def test_a_long_retry_after_does_not_starve_new_questions(stub: JudgeStub) -> None:
    assert MAX_RETRY_AFTER_S <= 5
    stub.always = status(503, retry_after="20")

    async def use(client: JudgeClient) -> Result:
        first = asyncio.create_task(client.judge(item("blue"), 25))
        while not stub.requests:
            await asyncio.sleep(0.01)
        stub.always = None
        result = await client.judge(item(), 15)
        await first
        return result

    assert isinstance(using(stub.url, use, concurrency=1), JudgeVerdict)


@pytest.mark.parametrize(
    "url",
    [
        "http://h:99999",
        "http://h:-1",
        "h:8000",
        "http://",
        "http://[::1",
        "http://a b",
        "ftp://h",
        "",
    ],
)
def test_an_address_that_is_none_is_refused_when_the_configuration_loads(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        ClientSettings(url=url)


@pytest.mark.parametrize(
    "written", [b"\xff\xfe{}", b'{"url": "http://127.0.0.1:99999"}', b"[" * 100_000, b""]
)
def test_an_announcement_that_is_none_is_waited_out(tmp_path: Path, written: bytes) -> None:
    entry = tmp_path / "judge.json"
    entry.write_bytes(written)
    settings = {
        "discovery": {"use": "rayloop.judge.discovery:FileDiscovery", "with": {"path": str(entry)}}
    }
    result = one("auto", patience=0.3, **settings)
    assert isinstance(result, JudgeUnscored)
    assert result.kind is NoVerdict.UNAVAILABLE
    withdraw(entry, Address(url="http://h:1"))
    assert entry.exists()


def test_what_nobody_foresaw_is_the_judges_failure(stub: JudgeStub) -> None:
    async def find() -> Address:
        raise OverflowError("getaddrinfo() argument 2 must be integer")

    async def run() -> Result:
        client = JudgeClient(ClientSettings(**FAST), find)
        try:
            return await client.judge(item(), 0.3)
        finally:
            await client.close()

    result = asyncio.run(run())
    assert isinstance(result, JudgeUnscored)
    assert (result.kind, "OverflowError" in result.reason) == (NoVerdict.UNAVAILABLE, True)


def keyed(*keys: str) -> Reply:
    async def reply(stub: JudgeStub, items: list[dict[str, Any]], receive: Any, send: Any) -> None:
        if stub.headers[-1].get("authorization") in [f"Bearer {key}" for key in keys]:
            return await stub.judge(items, send)
        await body(send, 403, b"{}")

    return reply


def with_a_new_key(
    stub: JudgeStub, key: Path, change: Callable[[str], None]
) -> tuple[list[Result], list[str]]:
    """The results of two questions, the file's key replaced between them, and every key that was
    sent.
    """

    async def use(client: JudgeClient) -> list[Result]:
        found = []
        for text in ("secret-1", "secret-2"):
            key.write_text(text, encoding="utf-8")
            key.chmod(0o600)
            change(text)
            found.append(await client.judge(item(f"with {text}"), 5))
        return found

    results = using(stub.url, use, key_file=str(key))
    return results, [sent["authorization"] for sent in stub.headers]


def test_a_key_that_changed_is_read_once_more(stub: JudgeStub, tmp_path: Path) -> None:
    results, sent = with_a_new_key(
        stub, tmp_path / "key", lambda text: setattr(stub, "always", keyed(text))
    )
    assert all(isinstance(result, JudgeVerdict) for result in results)
    assert sent == ["Bearer secret-1", "Bearer secret-1", "Bearer secret-2"]


def test_nothing_is_sent_without_the_key_that_could_not_be_read(
    stub: JudgeStub, tmp_path: Path
) -> None:
    async def use(client: JudgeClient) -> list[Any]:
        return [
            await asyncio.gather(client.judge(item(answer), 5), return_exceptions=True)
            for answer in ("a", "b")
        ]

    (first,), (second,) = using(stub.url, use, key_file=str(tmp_path / "missing"))
    assert isinstance(first, ConfigError)
    assert isinstance(second, ConfigError)
    assert not stub.requests


def test_a_file_system_in_trouble_is_waited_for(
    stub: JudgeStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, times, opened = tmp_path / "key", [], Path.open
    key.write_text("secret", encoding="utf-8")
    key.chmod(0o600)

    def stale(path: Path, *arguments: Any, **named: Any) -> Any:
        times.append(path)
        if path == key and times.count(key) < 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", stale)
    assert isinstance(one(stub.url, key_file=str(key)), JudgeVerdict)


def test_an_announced_key_lies_beside_the_announcement_or_is_named(
    stub: JudgeStub, tmp_path: Path
) -> None:
    """Otherwise an account that writes judge.json receives any file that looks like a key."""
    secret, entry = tmp_path / "token", tmp_path / "shared" / "judge.json"
    secret.write_text("hf_SECRET", encoding="utf-8")
    secret.chmod(0o600)
    announce(entry, Address(url=stub.url, key_file=str(secret)))
    settings = {
        "discovery": {"use": "rayloop.judge.discovery:FileDiscovery", "with": {"path": str(entry)}}
    }
    with pytest.raises(ConfigError, match="in another folder"):
        one("auto", **settings)
    assert not stub.requests
    assert isinstance(one("auto", key_file=str(secret), **settings), JudgeVerdict)
    entry.chmod(0o666)
    with pytest.raises(ConfigError, match=r"others must not write it: chmod go-w"):
        one("auto", key_file=str(secret), **settings)


def test_retry_after_is_honoured(stub: JudgeStub) -> None:
    stub.script = [status(429, retry_after="1")]
    began = time.monotonic()
    assert isinstance(one(stub.url), JudgeVerdict)
    assert time.monotonic() - began >= 1.0


def test_retry_after_is_read_as_seconds_or_date() -> None:
    assert retry_after("3") == 3
    assert retry_after("") == retry_after("soon") == retry_after("nan") == retry_after("-5") == 0
    assert retry_after("1e9") == MAX_RETRY_AFTER_S
    assert 1 < retry_after(email.utils.formatdate(time.time() + 4, usegmt=True)) <= 4
    assert retry_after(email.utils.formatdate(time.time() - 30, usegmt=True)) == 0


def test_a_dead_proxy_does_not_matter(stub: JudgeStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(one(stub.url), JudgeVerdict)


def test_the_breaker_opens_and_the_canary_closes_it(
    stub: JudgeStub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.always = status(503)

    async def use(client: JudgeClient) -> tuple[int, Result]:
        waiting = asyncio.create_task(client.judge(item(), 20))
        while client.breaker.state is BreakerState.CLOSED:
            await asyncio.sleep(0.01)
        sent = len(stub.asked)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert len(stub.asked) == sent, "an open breaker lets only canaries through"
        stub.always = None
        result = await waiting
        assert client.breaker.state is BreakerState.CLOSED
        return sent, result

    sent, result = using(stub.url, use, breaker_failures=3)
    assert sent == 3
    assert isinstance(result, JudgeVerdict)
    opened, closed = (
        record.getMessage() for record in caplog.records if record.name == "rayloop.judge.health"
    )
    assert f"until its canary is judged right: {stub.url}/v1/judge: HTTP 503" in opened
    assert closed == "the judge is well again"


def test_a_judge_that_judges_its_canary_wrong_stays_out(stub: JudgeStub) -> None:
    stub.script = [status(503)]
    stub.always = results()  # everything is right
    result = one(stub.url, patience=0.5, breaker_failures=1)
    assert isinstance(result, JudgeUnscored)
    assert "canaries are judged wrong" in result.reason
    assert stub.asked == ["red"]
    stub.script, stub.requests = [status(503)], []
    assert isinstance(one(stub.url, breaker_failures=1, canary=False), JudgeVerdict)


def test_equal_questions_are_asked_once(stub: JudgeStub) -> None:
    stub.always = slow(0.1)

    async def use(client: JudgeClient) -> list[Result]:
        first = await asyncio.gather(*(client.judge(item(f"answer {i % 4}"), 5) for i in range(64)))
        again = await asyncio.gather(
            *(client.judge(item(f"answer  {i % 4} "), 5) for i in range(64))
        )
        assert all(isinstance(result, JudgeVerdict) and result.cached for result in again)
        return first

    first = using(stub.url, use)
    assert sorted(stub.asked) == [f"answer {i}" for i in range(4)]
    assert all(isinstance(result, JudgeVerdict) for result in first)


def test_who_gives_up_does_not_take_the_answer_from_others(stub: JudgeStub) -> None:
    stub.always = slow(0.3)

    async def use(client: JudgeClient) -> list[Result]:
        return await asyncio.gather(client.judge(item(), 0.05), client.judge(item(), 5))

    early, late = using(stub.url, use)
    assert isinstance(early, JudgeUnscored)
    assert isinstance(late, JudgeVerdict)


def test_failures_are_not_remembered(stub: JudgeStub) -> None:
    stub.script = [results(score=7)]

    async def use(client: JudgeClient) -> list[Result]:
        return [await client.judge(item(), 5), await client.judge(item(), 5)]

    first, second = using(stub.url, use)
    assert isinstance(first, JudgeUnscored)
    assert isinstance(second, JudgeVerdict)
    assert not second.cached


def test_requests_are_bounded_and_fill_under_load(stub: JudgeStub) -> None:
    stub.always = slow(0.05)
    answers = [f"answer {i}" for i in range(48)]
    settings = {"concurrency": 3, "batch": 8}
    found = using(
        stub.url, lambda c: asyncio.gather(*(c.judge(item(a), 10) for a in answers)), **settings
    )
    assert all(isinstance(result, JudgeVerdict) for result in found)
    assert stub.most_busy == 3
    assert [len(request) for request in stub.requests] == [8] * 6


def test_fresh_items_pass_all_caches(stub: JudgeStub) -> None:
    async def use(client: JudgeClient) -> None:
        for _ in range(2):
            await client.judge(item(fresh=True), 5)

    using(stub.url, use)
    assert len(stub.requests) == 2


def test_another_judge_is_reported_and_asked_again(
    stub: JudgeStub, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(client: JudgeClient) -> list[str]:
        await client.judge(item("a"), 5)
        stub.fingerprint = "stub-2"
        await client.judge(item("b"), 5)
        await client.judge(item("a"), 5)
        return client.fingerprints

    with caplog.at_level(logging.WARNING, "rayloop.judge.client"):
        assert using(stub.url, use) == ["stub-1", "stub-2"]
    assert stub.asked == ["a", "b", "a"], "verdicts of the old judge are not the new one's"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "stub-1" in warning
    assert "stub-2" in warning


def test_verdicts_outlive_the_process(stub: JudgeStub, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache" / "verdicts.sqlite")

    async def use(client: JudgeClient) -> Result:
        client.fingerprint = "stub-1"
        return await client.judge(item(), 5)

    assert not using(stub.url, use, cache_file=cache).cached
    assert using(stub.url, use, cache_file=cache).cached
    assert len(stub.asked) == 1


def test_learning_whose_verdicts_a_file_holds_takes_none_of_the_patience(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        result = one(
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            patience=3.0,
            cache_file=str(tmp_path / "cache"),
        )
        assert time.monotonic() - began < 5.5
    assert isinstance(result, JudgeUnscored)


def test_a_broken_cache_file_costs_only_speed(stub: JudgeStub, tmp_path: Path) -> None:
    cache = tmp_path / "verdicts.sqlite"
    cache.write_bytes(b"this is no database" * 100)
    assert isinstance(one(stub.url, cache_file=str(cache)), JudgeVerdict)


def test_the_key_is_sent_and_must_be_private(stub: JudgeStub, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret-1\n", encoding="utf-8")
    key.chmod(0o600)
    assert isinstance(one(stub.url, key_file=str(key)), JudgeVerdict)
    assert stub.headers[-1]["authorization"] == "Bearer secret-1"
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod go-rwx") as refused:
        one(stub.url, key_file=str(key))
    assert "secret-1" not in str(refused.value)


def test_a_new_key_is_read_after_a_refusal(stub: JudgeStub, tmp_path: Path) -> None:
    stub.script = [status(403)]
    (refused, judged), sent = with_a_new_key(stub, tmp_path / "key", lambda text: None)
    assert isinstance(refused, JudgeUnscored)
    assert isinstance(judged, JudgeVerdict)
    assert sent == ["Bearer secret-1", "Bearer secret-2"]


def test_a_breaker_outlives_a_key_that_is_gone_for_a_while(stub: JudgeStub, tmp_path: Path) -> None:
    key, away = tmp_path / "key", tmp_path / "away"
    key.write_text("secret", encoding="utf-8")
    key.chmod(0o600)

    async def use(client: JudgeClient) -> Result:
        waiting = asyncio.create_task(client.judge(item(), 10))
        while client.breaker.state is BreakerState.CLOSED:
            await asyncio.sleep(0.01)
        key.rename(away)
        while not isinstance(client.last_error, ConfigError):
            await asyncio.sleep(0.01)
        away.rename(key)
        return await waiting

    stub.script = [status(503)]
    assert isinstance(using(stub.url, use, key_file=str(key), breaker_failures=1), JudgeVerdict)


def test_auto_finds_the_judge_where_it_moved(stub: JudgeStub, tmp_path: Path) -> None:
    entry = tmp_path / "judge.json"
    gone = Address(url="http://127.0.0.1:9")
    announce(entry, gone)
    settings = {
        "discovery": {"use": "rayloop.judge.discovery:FileDiscovery", "with": {"path": str(entry)}}
    }

    async def use(client: JudgeClient) -> Result:
        waiting = asyncio.create_task(client.judge(item(), 10))
        while client.last_error is None:
            await asyncio.sleep(0.01)
        announce(entry, Address(url=stub.url))
        return await waiting

    assert isinstance(using("auto", use, **settings), JudgeVerdict)
    withdraw(entry, gone)
    assert asyncio.run(FileDiscovery(FileDiscovery.Settings(path=str(entry)))()).url == stub.url
    withdraw(entry, Address(url=stub.url))
    with pytest.raises(InfrastructureFailure, match="no judge has written"):
        asyncio.run(FileDiscovery(FileDiscovery.Settings(path=str(entry)))())


def test_a_discovery_that_hangs_is_given_up_like_a_request(stub: JudgeStub) -> None:
    asked = []

    async def find() -> Address:
        asked.append(1)
        await asyncio.sleep(30 if len(asked) == 1 else 0)
        return Address(url=stub.url)

    async def run() -> Result:
        client = JudgeClient(ClientSettings(**{**FAST, "request_timeout": 0.2}), find)
        try:
            return await client.judge(item(), 10)
        finally:
            await client.close()

    assert isinstance(asyncio.run(run()), JudgeVerdict)
    assert len(asked) > 1


def test_nobody_there_names_the_address() -> None:
    result = one("http://127.0.0.1:9", patience=0.3)
    assert isinstance(result, JudgeUnscored)
    assert result.kind is NoVerdict.UNAVAILABLE
    assert "http://127.0.0.1:9" in result.reason
