"""``python -m tools.pages.compatibility`` prints docs/compatibility.md: published artefacts,
tried as it is made.
"""

from __future__ import annotations

from tools.pages.compatible import languages, pictures, rows, templates, tokenizers

HEADER = """# What works with published models

Made by `python -m tools.pages.compatibility`; do not edit. Each line was tried as this page
was made, on a CPU: ✓ equal, – the artefact itself does not have it. `tests/published` has the
artefacts and says where they come from.
"""
SECTIONS = (
    templates.section,
    tokenizers.section,
    rows.section,
    pictures.section,
    languages.section,
)
"""Each gives the lines of one section."""


def page() -> str:
    """docs/compatibility.md."""
    return (
        "\n".join([HEADER, *(line for section in SECTIONS for line in (*section(), ""))]).rstrip()
        + "\n"
    )


if __name__ == "__main__":
    print(page(), end="")
