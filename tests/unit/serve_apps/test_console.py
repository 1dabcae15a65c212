"""The run console: who is admitted, what each page shows, and that nothing of a run becomes markup
or leads out of its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient

from rayloop.core import events, incidents
from rayloop.judge.calibrate import CALIBRATION
from rayloop.run.folder import RunFolder
from rayloop.run.place import findable
from rayloop.serve_apps.console.app import HEADERS, PAGES, web
from tests.support.pictures import picture
from tests.unit.view.test_filmstrip import Tags
from tests.unit.view.test_filmstrip import hostile as hostile
from tests.unit.view.test_filmstrip import run as run
from tests.unit.view.test_trajectory_page import evaluated as evaluated
from tests.unit.view.test_trajectory_page import folder as folder

TOKEN = "a token of the test"


@contextmanager
def served(of: RunFolder, token: str = "") -> Iterator[TestClient]:
    with TestClient(
        web(of, token), "http://testserver" if token else "http://localhost", follow_redirects=False
    ) as client:
        yield client


def said(html: str) -> str:
    """The text of a page, its markup taken away."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def addresses(html: str) -> set[str]:
    return {
        value
        for name in ("href", "src", "action")
        for value in re.findall(rf'{name}="([^"#]+)', html)
    }


def test_who_has_no_token_sees_nothing(folder: RunFolder) -> None:
    with served(folder, TOKEN) as client:
        for path in (
            "/",
            "/rollouts?token=wrong",
            "/file/console.js",
            "/picture/0/rollouts/images/x.png",
            "/nowhere",
        ):
            answer = client.get(path)
            assert answer.status_code == 401, path
            assert "wrong" not in answer.text
            assert folder.path.name not in said(answer.text)
            assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
        assert client.post("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 405


def test_the_token_is_shown_once_and_kept_as_a_cookie(folder: RunFolder) -> None:
    with served(folder, TOKEN) as client:
        first = client.get("/rollouts", params={"token": TOKEN, "view": "episodes"})
        assert (first.status_code, first.headers["location"]) == (
            303,
            "http://testserver/rollouts?view=episodes",
        )
        assert "HttpOnly" in first.headers["set-cookie"]
        assert client.get("/rollouts").status_code == 200
        elsewhere = client.get(f"http://testserver//example.org/?token={TOKEN.replace(' ', '%20')}")
        assert elsewhere.headers["location"].startswith("http://testserver//")
    with served(folder, TOKEN) as client:
        assert client.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_every_page_allows_its_own_files_only(evaluated: RunFolder) -> None:
    with served(evaluated) as client:
        for path in every_page(client):
            answer = client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith(
                "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self';"
                " connect-src 'self'"
            )
            assert "unsafe" not in policy
            assert all(address.startswith(("/", "?")) for address in addresses(answer.text)), path
            assert " style=" not in answer.text
            assert len(answer.content) < 200_000


def test_all_links_of_a_console_below_another_address_lead_to_it(evaluated: RunFolder) -> None:
    with TestClient(
        web(evaluated, ""), "http://localhost", root_path="/console/run", follow_redirects=False
    ) as client:
        for path in (
            "/",
            "/rollouts?view=episodes",
            "/step/1",
            "/step/1/group/2",
            "/step/1/group/2/sample/1",
            "/evaluations",
        ):
            page = client.get(f"/console/run{path}")
            assert page.status_code == 200
            assert {
                a for a in addresses(page.text) if not a.startswith(("/console/run/", "?"))
            } == set(), path
    with TestClient(
        web(evaluated, TOKEN), root_path="/console/run", follow_redirects=False
    ) as client:
        first = client.get("/console/run/", params={"token": TOKEN})
        assert first.headers["location"] == "http://testserver/console/run/"


def every_page(client: TestClient) -> list[str]:
    """All pages that can be reached from the first one, pictures and files left out."""
    known, ahead = set[str](), ["/"]
    while ahead:
        known.add(path := ahead.pop())
        found = {address.replace("&amp;", "&") for address in addresses(client.get(path).text)}
        ahead += [
            new
            for new in sorted(found)
            if new not in {*known, *ahead} and not new.startswith(("/file/", "/picture/"))
        ]
    return sorted(known)


def test_every_step_group_episode_and_task_has_an_address(evaluated: RunFolder) -> None:
    with served(evaluated) as client:
        pages = every_page(client)
    assert {
        "/step/1/group/2/sample/1",
        "/step/2/group/5",
        "/step/2",
        "/evaluations/0/3?task=held-out-7",
    } <= set(pages)
    assert {re.sub(r"\d+", "N", page.partition("?")[0]) for page in pages} == {
        re.sub(r"{\w+:int}", "N", path) for path in PAGES
    }


def test_pages_show_what_is_on_record(evaluated: RunFolder) -> None:
    with served(evaluated) as client:
        overview = said(client.get("/").text)
        for fact in ("runs it", "step 3 of 3", "trained 8 (80 %)", "gain 0.400", "worker_lost"):
            assert fact in overview
        assert "group 1 : task-1 ( pages )" in said(client.get("/step/1").text)
        assert "mean reward 0.5, standard deviation 0.707; kept, replayed" in said(
            client.get("/step/1/group/2").text
        )
        episode = said(client.get("/step/1/group/1/sample/0").text)
        assert "task-1 : reward 0, kept , ended: done" in episode
        assert "Controls at step 3" in said(client.get("/evaluations").text)
        assert "held-out-0 0.000 0.750 0.750" in said(client.get("/evaluations").text)
        assert 'model.path "some/model"' in said(client.get("/configuration").text)
        assert client.get("/step/9").status_code == client.get("/step/1/group/9").status_code == 404
        assert "group 9 of step 1 is on record (keep_rollouts)" in said(
            client.get("/step/1/group/9").text
        )
        assert client.get("/rollouts?start=many").status_code == 400


def classes(html: str, tag: str) -> set[str]:
    return {
        name for found in re.findall(rf'<{tag}[^>]*class="([^"]*)"', html) for name in found.split()
    }


def test_rows_of_events_carry_no_class_that_a_style_could_hit(folder: RunFolder) -> None:
    """An event's kind is a word like ``controls`` or ``gain``, which the stylesheet uses for other
    things.
    """
    with served(folder) as client:
        for path in ("/events", "/step/3", "/"):
            html = client.get(path).text
            assert "controls" in html
            assert classes(html, "tr") == set(), path


@pytest.mark.parametrize("judged", [False, True])
def test_the_page_of_rewards_speaks_of_verdicts_where_a_judge_gives_them(
    folder: RunFolder, judged: bool
) -> None:
    source: dict[str, object] = {"use": "mine:reward"}
    if judged:
        source = {
            "use": "rayloop.judge.reward:JudgeReward",
            "with": {"judge": {"url": "http://127.0.0.1:9"}},
        }
    (folder.path / "config.yaml").write_text(
        yaml.safe_dump({"steps": 3, "reward": {"source": source}}), encoding="utf-8"
    )
    with served(folder) as client:
        html = client.get("/judge").text
    assert '<a href="/judge" aria-current="page">Rewards</a>' in html
    assert "<h1>Rewards</h1>" in html
    assert re.search(r"<h2>(\w+) of step", html)[1] == ("Verdicts" if judged else "Rewards")  # type: ignore[index]
    assert ("A judge is asked while the run lives" in html) == judged


def test_alarms_come_first(folder: RunFolder) -> None:
    folder.events.emit(incidents.Alarm("all_right", "nobody learns"), 3)
    with served(folder) as client:
        overview = client.get("/").text
    alarm = '<p class="alarm">[3] ALARM: nobody learns</p>'
    assert overview.index(alarm) < overview.index("gain 0.400") < overview.index("<svg")


def test_an_evaluation_is_told_in_words(folder: RunFolder) -> None:
    scores = {"val/reward/mean": 0.25, "val/scored": 8.0, "val/unscored": 0.0}
    folder.events.emit(events.Evaluated(scores), 3)
    with served(folder) as client:
        assert "held-out: reward 0.250 over 8 rows" in said(client.get("/events").text)


def test_pages_say_on_how_many_sources_the_policy_looks(folder: RunFolder) -> None:
    with served(folder) as client:
        for path in ("/", "/evaluations"):
            text = said(client.get(path).text)
            assert "The policy looks on 1 of 2 sources" in text, path
            assert "Not shown to look: color" in text, path
        assert "color not shown to look 9 1 0.100 [0.100, 0.100] 0.000 [0.000, 0.000]" in text


def test_the_configuration_begins_with_what_differs_from_the_defaults(folder: RunFolder) -> None:
    with served(folder) as client:
        html = client.get("/configuration").text
    rows = re.findall(r"<tr( class=\"differs\")?><td>([^<]*)</td>", html)
    assert {key for marked, key in rows if marked} >= {"model.path", "model.position_tint"}
    assert [bool(marked) for marked, _ in rows] == sorted(
        (bool(marked) for marked, _ in rows), reverse=True
    )


def test_numbers_of_pages_stand_apart(folder: RunFolder) -> None:
    for number in range(60):
        folder.events.emit(incidents.Alarm("all_right", f"alarm {number}"), 3)
    with served(folder) as client:
        assert re.search(r"1 to 50 of \d+ next 50", said(client.get("/events").text))


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("", "1 to 5 of 5"),
        ("step=1", "1 to 2 of 2"),
        ("status=filtered: all_wrong", "1 to 1 of 1"),
        ("least=0.6", "1 to 2 of 2"),
        ("most=0.2&view=episodes", "1 to 4 of 4"),
        ("source=elsewhere", "none"),
        ("text=bbox 0.3", "1 to 2 of 2"),
        ("text=task-4 where&end_reason=done", "1 to 1 of 1"),
        ("text=\"'; DROP TABLE episodes --", "none"),
        ("least=x", "1 to 5 of 5"),
    ],
)
def test_rollouts_are_filtered(evaluated: RunFolder, query: str, rows: str) -> None:
    with served(evaluated) as client:
        assert rows in said(client.get(f"/rollouts?{query}").text)


def test_the_highest_and_the_lowest_rewards_come_first(evaluated: RunFolder) -> None:
    with served(evaluated) as client:
        lowest = "/step/2/group/3/sample/0"
        for order, first in (
            ("highest", "/step/1/group/1/sample/1"),
            ("lowest", lowest),
            ("", lowest),
        ):
            html = client.get(f"/rollouts?view=episodes&order={order}").text
            assert re.findall(r"/step/\d+/group/\d+/sample/\d+", html)[0] == first, order


def test_a_page_that_has_not_changed_is_not_made_again(folder: RunFolder) -> None:
    with served(folder) as client:
        client.get("/rollouts")
        for path in ("/", "/rollouts", "/events"):
            stamp = client.get(path).headers["etag"]
            same = client.get(path, headers={"If-None-Match": stamp})
            assert (same.status_code, same.content) == (304, b"")
        times = {
            "timing_s/step": 9.0,
            "timing_s/gen": 6.0,
            "rollout/seconds/mean": 4.5,
            "rollout/seconds/engine": 3.25,
            "rollout/seconds/environment": 1.0,
        }
        folder.metrics.append({"step": 4, "reward/mean": 0.8, **times})
        overview = said(client.get("/", headers={"If-None-Match": stamp}).text)
        assert "step 4" in overview
        assert (
            "An episode of step 4 took 4.5 s on average: its engine 3.25 s, its environment 1 s."
            in overview
        )


METRICS = """# HELP judge_requests_total Requests by how they ended.
# TYPE judge_requests_total counter
judge_requests_total{outcome="ok",replica="r1",route="judge"} 12.0
judge_requests_created{outcome="ok",replica="r1",route="judge"} 1.7e+09
# HELP judge_latency_seconds From the parsed request to the answer.
# TYPE judge_latency_seconds histogram
judge_latency_seconds_bucket{le="1.0",replica="r1",route="judge"} 8.0
judge_latency_seconds_bucket{le="+Inf",replica="r1",route="judge"} 12.0
judge_latency_seconds_count{replica="r1",route="judge"} 12.0
judge_latency_seconds_sum{replica="r1",route="judge"} 6.0
# HELP judge_client_breaker_state 0 closed, 1 half open, 2 open.
# TYPE judge_client_breaker_state gauge
judge_client_breaker_state 2.0
# HELP python_info Of no interest.
# TYPE python_info gauge
python_info 1.0
"""
VERSION = {
    "version": "1",
    "fingerprint": "rule-<b>1</b>",
    "backend": "rule",
    "model": "",
    "rubrics": {},
}


@contextmanager
def answering(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    """The address of a server that gives these answers, and asks for no key."""

    class Judge(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@contextmanager
def own_live_run(root: Path) -> Iterator[RunFolder]:
    with RunFolder(root, "run").acquired() as live, findable(live.cluster, "127.0.0.1:1", "x"):
        yield live


@pytest.mark.parametrize(
    "ready",
    [
        (200, "{}"),
        (503, json.dumps({"ready": False, "failing": {"canary": "<i>judged wrong</i>"}})),
    ],
)
def test_the_judge_of_a_live_run_is_asked_how_it_is(tmp_path: Path, ready: tuple[int, str]) -> None:
    answers = {"/version": (200, json.dumps(VERSION)), "/metrics": (200, METRICS), "/readyz": ready}
    with answering(answers) as url, own_live_run(tmp_path) as live, served(live) as client:
        settings = {
            "judge": {"url": url, "breaker_failures": 3},
            "metrics_port": int(url.rpartition(":")[2]),
        }
        live.write_config(
            yaml.safe_dump(
                {
                    "reward": {
                        "source": {"use": "rayloop.judge.reward:JudgeReward", "with": settings}
                    }
                }
            )
        )
        html = client.get("/judge").text
        page = said(html)
        assert ("ready rule (no model) , fingerprint rule-<b>1</b>" in page) == (ready[0] == 200)
        assert ("not ready" in page and '"canary": "<i>judged wrong</i>"' in page) == (
            ready[0] == 503
        )
        assert "<i>judged" not in html
        assert (
            "Requests by how they ended. judge, ok 12" in page
            or "Requests by how they ended. ok, judge 12" in page
        )
        assert "From the parsed request to the answer. judge 0.5" in page
        assert "0 closed, 1 half open, 2 open. 2" in page
        assert "Of no interest" not in page


def test_a_judge_that_is_gone_or_set_wrongly_is_no_fault_of_the_page(tmp_path: Path) -> None:
    with own_live_run(tmp_path) as live, served(live) as client:
        for judge, why in (
            ({"url": "http://127.0.0.1:9"}, "127.0.0.1:9"),
            ({"url": "nonsense"}, "url"),
            ({"key_file": "gone"}, ""),
        ):
            live.write_config(
                yaml.safe_dump({"reward": {"source": {"use": "a:B", "with": {"judge": judge}}}})
            )
            page = client.get("/judge")
            assert page.status_code == 200
            assert "not ready" in said(page.text)
            assert why in said(page.text)
    with served(RunFolder(tmp_path, "run")) as client:
        assert "A judge is asked while the run lives" in said(client.get("/judge").text)


def test_no_text_of_a_run_becomes_markup(hostile: RunFolder) -> None:
    with served(hostile) as client:
        pages = every_page(client)
        assert {"/step/1/group/1/sample/0", "/judge"} <= set(pages)
        for path in pages:
            answer, tags = client.get(path), Tags()
            tags.feed(answer.text)
            assert [a for tag, a in tags.found if tag == "script"] == [
                {"src": "/file/console.js", "defer": None}
            ], path
            assert not [
                tag for tag, _ in tags.found if tag in ("img", "iframe", "object", "embed", "base")
            ]
            assert not [
                name for _, attributes in tags.found for name in attributes if name.startswith("on")
            ]
            assert len(answer.content) < 200_000
        episode = client.get("/step/1/group/1/sample/0").text
        assert "picture not shown" in episode
        assert "\ufffd\ufffd broken" in episode
        assert "? half" in episode


def test_pictures_are_those_of_the_run_without_the_tint(run: RunFolder) -> None:
    with served(run) as client:
        html = client.get("/step/1/group/1").text
        pictures = re.findall(r'href="(/picture/[^"]+)"', html)
        assert len(pictures) == len(set(pictures)) == 4, "each once"
        answer = client.get(pictures[0])
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/webp")
        assert "circle" in html
        assert "sample/0#turn-1" in html


@pytest.mark.parametrize(
    "path",
    [
        "0/../secret.png",
        "0/%2e%2e/secret.png",
        "0//etc/passwd",
        "0/config.yaml",
        "0/rollouts/step_000001.jsonl",
        "9/a.png",
        "-1/a.png",
        "0/%00",
        "0/link.png",
        "x/a.png",
        "0/" + "a" * 5000,
    ],
)
def test_nothing_but_pictures_below_the_folder_is_served(run: RunFolder, path: str) -> None:
    secret, link = run.path.parent / "secret.png", run.path / "link.png"
    secret.write_bytes(picture(4, 4))
    if not link.exists():
        link.symlink_to(secret)
    with served(run) as client:
        answer = client.get(f"/picture/{path}")
        assert answer.status_code in (307, 404, 422)
        assert not answer.content.startswith(b"\x89PNG")


def test_a_picture_beside_the_data_is_shown_and_one_elsewhere_is_not(tmp_path: Path) -> None:
    from tests.unit.view.test_filmstrip import member

    (tmp_path / "data").mkdir()
    for side, name in enumerate(("data/a.png", "b.png", "data/c.png"), start=60):
        (tmp_path / name).write_bytes(picture(side, 40))
    with RunFolder(tmp_path, "run").acquired() as made:
        made.write_config(f"data: {{train: {tmp_path}/data/rows.jsonl}}\n")
        records = [member(0), member(1), member(2)]
        for record, name in zip(records, ("data/a.png", "b.png", "data/c.png"), strict=True):
            sha256 = (
                "0" * 64
                if name == "data/c.png"
                else hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
            )
            image = {"sha256": sha256, "width": 60, "height": 40, "path": str(tmp_path / name)}
            object.__setattr__(record, "images", (image,))
        made.rollouts.write(1, records, {})
    with served(made) as client:
        assert client.get("/picture/1/c.png").status_code == 404, "no page has shown it"
        shown, hidden, other = (
            client.get(f"/step/1/group/1/sample/{sample}").text for sample in (0, 1, 2)
        )
        assert (
            client.get(re.findall(r'href="(/picture/[^"]+)"', shown)[0]).headers["content-type"]
            == "image/png"
        )
        assert client.get("/picture/1/c.png").status_code == 404
    assert "is neither in the run&#39;s folder nor next to its data" in hidden
    assert "is not the picture that the run showed" in other, (
        "who made the folder does not know what is in it"
    )


def test_two_runs_are_compared_and_no_file_elsewhere_is_read(folder: RunFolder) -> None:
    other = folder.path.parent / "other"
    other.mkdir()
    (other / "config.yaml").write_text("steps: 9\nmodel: {path: some/model}\n", encoding="utf-8")
    with served(folder) as client:
        text = said(client.get("/configuration?other=other").text)
        assert "steps 3 9" in text
        assert "model.path" not in text, "it is the same"
        for wrong in ("../../etc", "/etc/passwd", "nowhere"):
            assert client.get("/configuration", params={"other": wrong}).status_code == 404


def test_a_run_that_has_only_begun_has_every_page(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "run").acquired() as made:
        made.write_config("steps: 3\n")
        made.events.emit(events.Start("0123abcd", {}))
        with served(made) as client:
            assert "runs it" in said(client.get("/").text)
            assert all(client.get(path).status_code == 200 for path in every_page(client))


def test_an_event_of_another_version_is_shown_with_its_fields(folder: RunFolder) -> None:
    folder.events.append({"event": "checkpoint", "step": 2, "place": "elsewhere"})
    with served(folder) as client:
        assert "elsewhere" in said(client.get("/events?kind=checkpoint").text)


def test_the_newest_calibration_is_shown_with_what_rules_decide_otherwise(tmp_path: Path) -> None:
    family = {
        "name": "chart",
        "count": 40,
        "accuracy": 0.9,
        "kappa": math.nan,
        "false_positives": 0.1,
        "false_negatives": 0.0,
    }
    differs = {
        "item": "c7",
        "question": "How <b>many</b>?",
        "reference": "3",
        "answer": "3.0",
        "label": "correct",
    }
    found = {
        "time": 0.0,
        "url": "http://judge:8000",
        "fingerprint": "f1",
        "asked": 9,
        "problems": ["accuracy 0.600, at least 0.85 wanted"],
        "scores": [{**family, "attacks": 4, "attack_rate": 0.25, "unscored": 2}],
        "disputed": [
            {**differs, "rules": "correct", "model": "incorrect", "reason": "another text"}
        ],
    }
    with RunFolder(tmp_path, "run").acquired() as run, served(run) as client:
        run.write_config(
            yaml.safe_dump({"reward": {"source": {"use": "rayloop.judge.reward:JudgeReward"}}})
        )
        assert "Calibration" not in said(client.get("/judge").text)
        for broken in ("{", "7", "[1]"):
            (tmp_path / CALIBRATION).write_text(broken, encoding="utf-8")
            assert "Calibration" not in said(client.get("/judge").text)
        (tmp_path / CALIBRATION).write_text(json.dumps(found), encoding="utf-8")
        html = client.get("/judge").text
    page = said(html)
    assert "Calibration of http://judge:8000 at 1970-01-01 00:00:00" in page
    assert "does not pass accuracy 0.600, at least 0.85 wanted" in page
    assert "chart 40 0.900 nan 0.100 0.000 4 0.250 2" in page
    assert "Rules and model differ on 1 of 9 items" in page
    assert "How <b>many</b>? 3 3.0 correct correct incorrect another text" in page
    assert "<b>many" not in html
