"""The checkouts in ``ORIGINALS`` have the states that were read."""

from __future__ import annotations

import pytest

from tests.support.originals import COMMITS, needs_originals, source

LICENCES = {
    "jbarnes850/verl",
    "agents-x-project/PyVision-RL",
    "Visual-Agent/DeepEyes",
    "dvlab-research/ARPO",
}


@needs_originals
@pytest.mark.parametrize("repository", COMMITS)
def test_a_repository_has_its_commit(repository: str) -> None:
    assert source(repository, "README.md")


@needs_originals
@pytest.mark.parametrize("repository", sorted(LICENCES))
def test_what_is_shipped_from_it_has_a_licence(repository: str) -> None:
    text = source(repository, "LICENSE")
    assert "MIT License" in text or "Apache License" in text
