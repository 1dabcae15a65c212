"""The site in a real Chromium: built strictly, searched, nothing fetched from elsewhere."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.envs.programs import needs
from tools.pages import site

pytest.importorskip("playwright", reason="make test-env installs playwright")
pytest.importorskip("mkdocs", reason="make test-env installs mkdocs-material")

from playwright import sync_api

pytestmark = [pytest.mark.env, needs("chromium-headless-shell")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    site.build(out)
    return out


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_page_is_there_and_in_the_list_for_language_models(built: Path) -> None:
    made = {path.relative_to(built).with_suffix(".md") for path in built.rglob("*.html")}
    expected = {
        page.with_name("index.md") if page.name == "README.md" else page for page in site.pages()
    }
    assert expected <= made, expected - made
    listed = re.findall(
        r"^- \[[^\]]+\]\(([^)]+)\): .+$",
        (built / "llms.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(listed) > 30
    assert {path for path in listed if not (site.ROOT / path).is_file()} == set()
    assert {str(page) for page in site.pages() if page.parent == Path("docs")} - set(listed) - {
        "docs/README.md"
    } == set()


def test_a_link_that_leads_nowhere_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("# A\n\nAbout.\n\n[lost](docs/lost.md)\n", encoding="utf-8")
    (root / "docs/README.md").write_text(
        "# B\n\n## C\n\n- [README](../README.md): D\n", encoding="utf-8"
    )
    monkeypatch.setattr(site, "ROOT", root)
    with pytest.raises(site.subprocess.CalledProcessError):
        site.build(tmp_path / "out")
    (root / "docs/lost.md").write_text("# Found\n", encoding="utf-8")
    site.build(tmp_path / "out")


def test_a_reader_finds_a_page_by_its_words(address: str) -> None:
    said: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 800}, color_scheme="dark")
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/index.html")
        assert page.evaluate("document.body.dataset.mdColorScheme") == "slate"
        assert page.evaluate(
            "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
        )
        page.fill("input.md-search__input", "staleness")
        result = page.locator("a.md-search-result__link").first
        result.wait_for(timeout=20_000)
        found = result.get_attribute("href")
        assert found is not None
        page.goto(found)
        assert "staleness" in page.locator("article").inner_text()
        browser.close()
    assert said == []
    assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()
