"""What the published functions of Chart-RVR and its fork pay for fixed random completions, as their
own code paid it.
"""

from __future__ import annotations

import json

import pytest

from tests.originals.test_chart_rvr import FILE, REPOSITORIES, WRITTEN, cases, equal, ours


@pytest.mark.parametrize("variant", REPOSITORIES)
def test_the_variant_pays_what_the_original_paid(variant: str) -> None:
    expected = json.loads(FILE.read_text(encoding="utf-8"))[variant]
    assert len(expected) == WRITTEN
    wrong = [
        (index, name)
        for index, (case, values) in enumerate(zip(cases(WRITTEN), expected, strict=True))
        for name, paid in ours(case, variant).items()
        if not equal(paid, values[name])
    ]
    assert wrong == []
