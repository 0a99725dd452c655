"""The ranks as a table in a notebook.

It has no script, and nothing is fetched. Colours are those of the notebook's theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from mpiddp.remote.job import Member, group_by_host
from mpiddp.wording import count_noun, name_ranks

COLUMNS = ("rank", "device", "threads", "process")
MOST_OPEN = 16
"""Ranks that are shown without a click; of more, only a line for each host is."""
LEFT = "text-align: left"


def draw_ranks(members: Sequence[Member], state: str, lost_rank: int | None = None) -> str:
    """HTML of one table for each host, with one row for each rank.

    Args:
        state: what they do, or `ended: ` and why.
        lost_rank: the rank with which the job has ended.
    """
    usual = state.partition(":")[0]
    states = {m.rank: "lost" if m.rank == lost_rank else usual for m in members}
    is_open = len(members) <= MOST_OPEN
    hosts = group_by_host(members).items()
    tables = (_draw_host(host, found, states, is_open) for host, found in hosts)
    head = f"<strong>{count_noun(len(members), 'rank')}</strong>, {escape(state)}"
    return f"<div>{head}{''.join(tables)}</div>"


def _draw_host(
    host: str, members: Sequence[Member], states: Mapping[int, str], is_open: bool
) -> str:
    by_state: dict[str, list[int]] = {}
    for member in members:
        by_state.setdefault(states[member.rank], []).append(member.rank)
    parts = [f"{name_ranks(ranks)} {escape(state)}" for state, ranks in by_state.items()]
    rows = "".join(
        _draw_row("td", [*(getattr(member, column) for column in COLUMNS), states[member.rank]])
        for member in members
    )
    head = _draw_row("th", [*COLUMNS, "state"])
    return (
        f"<details{' open' if is_open else ''}>"
        f"<summary><strong>{escape(host)}</strong>: {', '.join(parts)}</summary>"
        f'<table style="margin-left: 1em"><thead>{head}</thead>'
        f"<tbody>{rows}</tbody></table></details>"
    )


def _draw_row(kind: str, texts: Sequence[object]) -> str:
    cells = (f'<{kind} style="{LEFT}">{escape(str(text))}</{kind}>' for text in texts)
    return f"<tr>{''.join(cells)}</tr>"
