"""What PyVision-RL's and DeepEyes' own functions paid for 400 texts each (tests/originals), which
``variant: original`` pays.
"""

from __future__ import annotations

import json

import pytest

from tests.originals.test_pyvision import EXPECTED, FUNCTIONS, KEPT, cases, ours


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_original_variant_pays_what_the_published_function_paid(function: str) -> None:
    expected, paid = json.loads(EXPECTED.read_text(encoding="utf-8"))[function], ours(function)
    assert len(expected) == KEPT
    assert [paid(case) for case in cases(KEPT)] == [pytest.approx(value) for value in expected]
