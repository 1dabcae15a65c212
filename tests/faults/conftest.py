"""Models for the tests with real runs, and the table of what each fault cost."""

import pytest

from tests.support import fault_table
from tests.support.models import digits_model as digits_model
from tests.support.models import grounding_model as grounding_model


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if fault_table.ROWS:
        terminalreporter.section("faults")
        for line in fault_table.lines():
            terminalreporter.write_line(line)
        fault_table.write()
