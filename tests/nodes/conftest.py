"""The model of the runs, and the matrix of what was lost."""

import pytest

from tests.support import node_matrix as matrix
from tests.support.models import digits_model as digits_model


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if matrix.CELLS:
        terminalreporter.section("nodes")
        for line in matrix.lines():
            terminalreporter.write_line(line)
        matrix.write()
