"""The ranks as a table in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mpiddp.remote.job import Member

COLUMNS = ("rank", "host", "device", "threads", "process")


def draw_ranks(members: Sequence[Member], state: str) -> str:
    """HTML of a table with one row for each rank."""
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(str(getattr(m, c)))}</td>" for c in COLUMNS) + "</tr>"
        for m in members
    )
    return f"<table><caption>{escape(state)}</caption><tr>{head}</tr>{rows}</table>"
