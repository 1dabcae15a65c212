"""Names of components that installed packages bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloop.config.plugins import GROUPS
from rayloop.config.settings import Component, NotImported, without_foreign_code
from rayloop.core.failures import ConfigError


def install(folder: Path, package: str, group: str, **names: str) -> None:
    """What pip leaves of a package that registers ``names``: its module and its metadata."""
    folder.mkdir(exist_ok=True)
    (folder / f"{package}.py").write_text(
        "def closeness(trajectory, task, context):\n    return 0.5\n", encoding="utf-8"
    )
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8"
    )
    points = "".join(f"{name} = {value}\n" for name, value in names.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{points}", encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.parametrize("group", GROUPS)
def test_an_installed_package_makes_its_name_known(site: Path, group: str) -> None:
    package = f"plugged_{GROUPS.index(group)}"
    install(site, package, group, nearness=f"{package}:closeness")
    assert Component(use="nearness").build()(None, None, None) == 0.5
    assert Component(use=f"{package}:closeness").build()(None, None, None) == 0.5


def test_a_name_that_two_packages_claim_is_refused(site: Path) -> None:
    install(site, "claimant_a", "rayloop.rewards", nearness="claimant_a:closeness")
    install(site, "claimant_b", "rayloop.rewards", nearness="claimant_b:closeness")
    with pytest.raises(ConfigError, match=r"several plug-ins \(claimant_a: .*claimant_b: "):
        Component(use="nearness").resolve()


def test_two_packages_may_register_one_place(site: Path) -> None:
    install(site, "registrant_a", "rayloop.rewards", nearness="registrant_a:closeness")
    install(site, "registrant_b", "rayloop.rewards", nearness="registrant_a:closeness")
    assert Component(use="nearness").build()(None, None, None) == 0.5


def test_an_unknown_name_is_refused_with_the_nearest_one(site: Path) -> None:
    install(site, "neighbour", "rayloop.rewards", nearness="neighbour:closeness")
    with pytest.raises(
        ConfigError, match="plug-in of an installed package; did you mean `nearness`"
    ):
        Component(use="neerness").resolve()


def test_a_plug_in_is_foreign_code(site: Path) -> None:
    install(site, "foreigner", "rayloop.rewards", nearness="foreigner:closeness")
    with without_foreign_code(), pytest.raises(NotImported):
        Component(use="nearness").resolve()
