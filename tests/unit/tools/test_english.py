"""The check of the English: what it counts, and where."""

from __future__ import annotations

import pytest

from tools.english import families, of_page, of_source, of_yaml


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("This is no command.", 1),
        ("It is no longer used.", 0),
        ("It is not a command.", 0),
        ("Of both.", 1),
        ("One of both.", 0),
        ("A filter of one's own, or of your own.", 2),
        ("The node is gone.", 1),
        ("There are two of them.", 0),
        ("Those that are left.", 1),
        ("They begin anew, beside a file.", 2),
        ("The rule stands in the file, which lies below the folder.", 2),
        ("None when there is none, and nobody knows why the others are none.", 2),
        ("None when the file does not exist. Each is None.", 0),
        ("The run goes on, unless the save went well.", 2),
        ("The run goes to the next step, and continues well.", 0),
        ("It counts from 1 on, and from now on. Rows from ``start`` on are read.", 3),
        ("It starts from tiny/ on four pages, and reads py-spy's output from stdin.", 0),
        ("Who holds the lock; who waits for it.", 2),
        ("Who holds the lock?", 0),
        ("The process that holds the lock, or who last held it.", 0),
        ("A run does without it, for want of memory.", 2),
        ("It ends after so many steps, the last one among them.", 2),
        ("It has so many rows that one is cut.", 0),
    ],
)
def test_a_construction_counts_each_time(words: str, count: int) -> None:
    assert len(list(families(words))) == count


def test_docstrings_messages_and_comments_of_a_module_are_read() -> None:
    source = '''"""What it is,
in two lines."""
LIMIT = 3  # of the requests
"""Requests at once."""
raise ValueError(f"the folder {LIMIT} does not exist")
name = f"{LIMIT}-{LIMIT}"
'''
    found = [(text.kind, text.words, text.lines) for text in of_source("module.py", source)]
    assert sorted(found) == [
        ("comments", "of the requests", 1),
        ("docstrings", "Requests at once.", 1),
        ("docstrings", "What it is, in two lines.", 2),
        ("messages", "the folder {} does not exist", 1),
    ]


def test_comments_of_yaml_are_read() -> None:
    source = "# What it sets.\nsteps: 3  # of the run\nname: 'a#b'\n"
    assert [text.words for text in of_yaml("a.yaml", source)] == ["What it sets.", "of the run"]


def test_a_page_is_read_without_programs_and_not_at_all_when_a_program_makes_it() -> None:
    page = "# Title\n\nText.\n\n    make test\n\n```yaml\nsteps: 3\n```\n"
    assert [text.words for text in of_page("a.md", page)] == ["# Title", "Text."]
    assert list(of_page("a.md", "# Title\n\nMade by `python -m tools.pages.config`.\n")) == []
