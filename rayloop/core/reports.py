"""What programs outside of rayloop report when an episode breaks: the table failures.yaml."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

OTHER = "other"
"""The row of reports that have none."""
REFUSED = "refused"
"""The class of a report that the policy sees, and after which it may try again."""
# By libyaml where it is installed: every process reads the table when it starts.
_TABLE: Mapping[str, Mapping[str, Sequence[str]]] = yaml.load(
    Path(__file__).with_name("failures.yaml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
"""Protocol -> report -> its class, and why it has that class."""


def class_of(protocol: str, report: str) -> str:
    """The class of a report: REFUSED, ``policy`` (``Blame.POLICY``), or the value of a Cause."""
    rows = _TABLE[protocol]
    return rows.get(report, rows[OTHER])[0]


def names(protocol: str) -> frozenset[str]:
    """The reports of ``protocol`` that have a row of their own."""
    return frozenset(_TABLE[protocol]) - {OTHER}
