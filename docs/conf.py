"""Makes the site of README, the chapters and the docstrings: python -m sphinx -c docs . site"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import mpiddp

GROUPS = {
    "Tutorial": ["README", "docs/recipes"],
    "How to": [
        *("docs/questions", "docs/launching", "docs/slurm", "docs/centres", "docs/cluster"),
        *("docs/ranks", "docs/training", "docs/coming-from-torchrun", "docs/troubleshooting"),
        "docs/benchmarks",
    ],
    "Reference": ["docs/api", "docs/collectives"],
    "Explanation": ["docs/learning", "docs/algorithms"],
    "About": [
        *("docs/about/features", "docs/about/performance", "docs/about/reliability"),
        *("docs/about/architecture", "docs/about/torch-backend-tests"),
        *("CHANGELOG", "CONTRIBUTING", "SECURITY"),
    ],
}
"""The menu. Sphinx warns of a page that is not in it."""

project = author = "mpiddp"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
# The checkout is the source, so that links lead where they lead on GitHub.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "runs", "site"]
myst_heading_anchors = 6
html_theme = "furo"
html_title = "mpiddp"
html_copy_source = html_show_copyright = False
autodoc_member_order = "bysource"
default_role = "py:obj"
add_module_names = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 90


def edit_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Append the menu to README, where GitHub would show it as code; folders are no pages."""
    source[0] = re.sub(r"\[([^]]+)\]\([\w./-]+/\)", r"\1", source[0])
    if name == root_doc:
        for caption, pages in GROUPS.items():
            lines = "\n".join("Quick start <self>" if page == root_doc else page for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises"}


def format_docstring(
    app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]
) -> None:
    """Write as reStructuredText the lists and the examples, which are indented in docstrings."""

    def format_list(section: re.Match[str]) -> str:
        field = FIELDS[section[1]]
        return re.sub(r"(?m)^    (\**)(\S.*?): ", rf":{field} \2: ", section[2])

    text = re.sub(rf"(?m)^({'|'.join(FIELDS)}):\n((?:    .*\n)+)", format_list, "\n".join(lines))
    # A link instead of code.
    text = re.sub(rf"``({'|'.join(mpiddp.__all__)})``", r"`\1`", text)
    lines[:] = re.sub(r"(?m)^(\S.*\n)\n(?=    )", r"\1\n::\n\n", text).split("\n")


FOUND = {"IterableStyle", "MapStyle", "Ranks", "Row", "Session"}
"""Classes that nobody calls: functions return them, or one writes the like."""


def format_signature(
    app: Sphinx, what: str, name: str, found: object, options: object, signature: str, returned: str
) -> tuple[str, str] | None:
    """Leave out what a reader never makes, and ``...`` for defaults that are objects."""
    if signature and (what == "exception" or name.rpartition(".")[2] in FOUND):
        return "", ""
    return signature and re.sub(r"<[^>]*>", "...", signature), returned


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Servers and readers look for index.html."""
    if error is None:
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.connect("build-finished", add_index)
    app.connect("source-read", edit_page)
    app.connect("autodoc-process-docstring", format_docstring)
    app.connect("autodoc-process-signature", format_signature)
