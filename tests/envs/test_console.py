"""The console of a real run folder, served by its command, in a real Chromium: pages, filters,
clicks, and a step that appears.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayloop.core import events, incidents
from rayloop.run.folder import RunFolder
from rayloop.run.records.rollouts import RolloutDump
from tests.envs.programs import needs
from tests.envs.test_report import CLICKS, WIDE, check_clicks
from tests.envs.test_report import painted as painted
from tests.support.consoles import opened
from tests.unit.view.test_filmstrip import hostile as hostile
from tests.unit.view.test_trajectory_page import CONFIG as CONFIG
from tests.unit.view.test_trajectory_page import evaluated as evaluated
from tests.unit.view.test_trajectory_page import folder as folder

pytest.importorskip("playwright", reason="make test-env installs playwright")

from playwright import sync_api

pytestmark = [pytest.mark.env, needs("chromium-headless-shell", "bwrap")]

PAGES = ("/", "/curves", "/rollouts", "/evaluations", "/events", "/judge", "/configuration")
AXE = "axe-core@4.10.3"
"""Of npm: rules of accessibility (WCAG) that a browser checks."""
PHONE = {"width": 390, "height": 844}


@contextmanager
def served(run: RunFolder) -> Iterator[str]:
    """The address, with its token, that the command prints."""
    command = [sys.executable, "-m", "rayloop", "console", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("console: http://127.0.0.1:"), line
            yield opened(line)
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def shown(run: RunFolder, **options: Any) -> Iterator[Any]:
    """The first page in a browser; afterwards nothing was said on its console, and nothing was
    asked for elsewhere.
    """
    said: list[str] = []
    asked: list[str] = []
    with served(run) as address, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
        )
        base = address.partition("/?")[0]
        page = browser.new_page(
            base_url=base, **{"viewport": {"width": 1400, "height": 900}, **options}
        )
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        assert page.url == f"{base}/", "the token is not kept in the address"
        yield page
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(base)] == []


def test_clicks_are_drawn_on_the_pictures_of_a_group_and_its_episodes(painted: RunFolder) -> None:
    with shown(painted) as page:
        page.get_by_role("link", name="Rollouts").click()
        page.get_by_role("link", name="group 1").click()
        assert page.url.endswith("/step/1/group/1")
        check_clicks(page, page.locator("tr.member").first.locator("td.turn"))
        page.get_by_role("link", name="#0").click()
        assert page.url.endswith("/step/1/group/1/sample/0")
        check_clicks(page, page.locator("tr.member").first.locator("td.turn"))
        assert page.locator("article.message").count() >= 4
        page.get_by_role("link", name="turn 2").first.click()
        assert page.url.endswith("#turn-2")
        assert f"{round(1000 * CLICKS[1][0] / WIDE)}" in page.locator("article:target").inner_text()
        assert (
            page.locator("#tree summary")
            .nth(1)
            .inner_text()
            .startswith("turn 2, click left at 180, 120")
        )


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its script."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("missing here: npm")
    done = subprocess.run(
        [npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=100
    )
    if done.returncode:
        pytest.skip(f"{AXE} cannot be had here: {done.stderr.splitlines()[-1:]}")
    with tarfile.open(folder / done.stdout.strip()) as package:
        script = package.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark", "viewport": PHONE}])
def test_no_page_has_a_serious_fault_of_accessibility(
    evaluated: RunFolder, painted: RunFolder, axe: str, options: dict[str, Any]
) -> None:
    faults = []
    pages = (
        (evaluated, (*PAGES, "/step/1", "/evaluations/0/3?task=held-out-3")),
        (painted, ("/step/1/group/1/sample/1",)),
    )
    for run, paths in pages:
        with shown(run, bypass_csp=True, **options) as page:
            for path in paths:
                page.goto(path)
                page.evaluate(axe)
                found = page.evaluate("axe.run()")
                assert len(found["passes"]) > 10, "the rules were applied"
                faults += [
                    (
                        path,
                        fault["id"],
                        fault["nodes"][0]["html"][:200],
                        fault["nodes"][0]["failureSummary"],
                    )
                    for fault in found["violations"]
                    if fault["impact"] in ("serious", "critical")
                ]
    assert faults == []


@pytest.mark.parametrize(
    "options", [{}, {"color_scheme": "dark"}, {"viewport": PHONE}, {"java_script_enabled": False}]
)
def test_every_page_opens_in_light_and_dark_on_a_phone_and_without_scripts(
    evaluated: RunFolder, options: dict[str, Any]
) -> None:
    with shown(evaluated, **options) as page:
        for path in (
            *PAGES,
            "/step/1",
            "/step/1/group/2",
            "/step/1/group/2/sample/1",
            "/evaluations/0/3?task=held-out-3",
        ):
            assert page.goto(path).status == 200
            assert page.locator("h1").first.is_visible()
            assert "run – rayloop" in page.title()
            if options.get("java_script_enabled", True):
                assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
                    f"{path} itself does not scroll"
                )
                dark = (
                    page.evaluate("getComputedStyle(document.body).backgroundColor")
                    == "rgb(21, 24, 28)"
                )
                assert dark == (options.get("color_scheme") == "dark")


def test_columns_of_text_keep_their_words_whole_on_a_phone(evaluated: RunFolder) -> None:
    with shown(evaluated, viewport=PHONE) as page:
        for path in ("/rollouts", "/rollouts?view=episodes", "/events"):
            page.goto(path)
            widths = page.eval_on_selector_all(
                "td.said", "cells => cells.map(cell => cell.getBoundingClientRect().width)"
            )
            assert widths, path
            assert min(widths) >= 100, f"{path}: fewer than ten letters beside each other"


def test_rollouts_are_filtered_by_choices_and_words(evaluated: RunFolder) -> None:
    with shown(evaluated) as page:
        page.goto("/rollouts")
        assert page.locator("tbody tr, table tr:has(td)").count() == 5
        page.get_by_label("outcome").select_option("filtered: all_wrong")
        page.wait_for_url("**status=filtered*")
        assert page.locator("p.pages").inner_text() == "1 to 1 of 1"
        page.get_by_label("outcome").select_option("")
        page.wait_for_url(lambda url: "filtered" not in url)
        page.get_by_label("text").fill("0.3,0.3")
        page.keyboard.press("Enter")
        page.wait_for_url("**text=0.3*")
        assert page.locator("p.pages").inner_text() == "1 to 2 of 2"
        page.get_by_label("show").select_option("episodes")
        page.wait_for_url("**view=episodes*")
        assert page.locator("p.pages").inner_text() == "1 to 4 of 4"


def test_the_keyboard_leads_to_the_content_and_along_the_pages(evaluated: RunFolder) -> None:
    with shown(evaluated) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        assert page.locator(".skip").bounding_box()["x"] >= 0, "it can be seen now"
        for _ in range(4):
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Rollouts"
        page.keyboard.press("Enter")
        page.wait_for_url("**/rollouts")


def test_hostile_texts_are_shown_as_they_are(hostile: RunFolder) -> None:
    with shown(hostile) as page:
        for path in (*PAGES, "/step/1", "/step/1/group/1", "/step/1/group/1/sample/0"):
            page.goto(path)
            assert page.title().endswith("run – rayloop"), path
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        assert page.locator("p.missing").first.is_visible()
        assert "document.title = 'owned'" in page.locator("article.sampled pre").first.inner_text()
        assert page.locator("article.sampled details pre").first.is_hidden(), "a megabyte is folded"


def test_a_step_of_a_live_run_appears_on_the_page_that_is_open(
    painted: RunFolder, tmp_path: Path
) -> None:
    """The records come from the product's writers; the page is not loaded again, and keeps what a
    person does in it.
    """
    shutil.copytree(painted.path, tmp_path / "live")
    with RunFolder(tmp_path, "live").acquired() as run, shown(run) as page:
        page.set_default_timeout(20_000)
        page.evaluate("window.same = true")
        seconds = []
        for step in (2, 3, 4):
            began = time.monotonic()
            append(run, step)
            page.locator("#steps a", has_text=re.compile(rf"^{step}$")).wait_for()
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 2, "other work on this machine may delay some of them"
        assert page.locator("#last").inner_text() == "step 4"
        page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
        run.events.emit(incidents.Alarm("reward", why="<b>the reward fell</b>"), 4)
        append(run, 5)
        page.get_by_text("ALARM: <b>the reward fell</b>").wait_for()
        assert page.evaluate("getSelection().toString()") == "live", "what is selected stays"
        page.evaluate("getSelection().removeAllRanges()")
        page.locator("#state", has_text="step 5").wait_for()
        assert page.evaluate("window.same"), "the page was not loaded again"
        page.goto("/rollouts")
        page.evaluate("window.same = true")
        page.get_by_label("text").fill("half a wo")
        append(run, 6)
        page.locator("#found a", has_text=re.compile(r"^6$")).first.wait_for()
        assert page.get_by_label("text").input_value() == "half a wo", "what is being typed stays"
        assert page.evaluate("window.same")


def append(run: RunFolder, step: int) -> None:
    """What the driver writes for a step: its rollouts, its event, its metrics."""
    source, target = run.rollouts.file(1), RolloutDump(run.rollouts.path)
    records = [
        json.loads(line) | {"step": step}
        for line in source.read_text(encoding="utf-8").splitlines()
    ]
    target.file(step).write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    run.events.emit(events.Trained({"1": [0, 1]}), step)
    run.metrics.append(
        {
            "step": step,
            "reward/mean": step / 10,
            "timing_s/step": 2.0,
            "timing_s/gen": 1.5,
            "ledger/trained": 2.0 * step,
        }
    )


def test_nobody_without_the_token_is_admitted(evaluated: RunFolder) -> None:
    with served(evaluated) as address, pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(address.partition("?")[0], timeout=10)
