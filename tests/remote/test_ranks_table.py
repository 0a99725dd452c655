"""The table that a notebook shows of ranks: what it says, and how JupyterLab shows it."""

import socket
from collections.abc import Iterator, Sequence

import pytest

import browser
from browser import Page
from mpiddp.remote.channel import Channel
from mpiddp.remote.job import Member
from mpiddp.remote.rank_table import MOST_OPEN, draw_ranks

THEMES = {
    "light": ("white", "rgba(0, 0, 0, 0.87)", "rgba(0, 0, 0, 0.87)", "#f5f5f5"),
    "dark": ("#111", "white", "rgba(255, 255, 255, 0.87)", "#212121"),
}
"""JupyterLab's --jp-layout-color0, --jp-content-font-color1, --jp-ui-font-color1, and
--jp-rendermime-table-row-background."""
STYLE = """
:root {{ background: {0}; }}
.output {{ color: {1}; font: 14px/1.6 sans-serif; padding-right: 20px; }}
.output strong {{ font-weight: bold; }}
.output table {{
  border-collapse: collapse; border-spacing: 0; border: none; color: {2}; font-size: 13px;
  table-layout: fixed; margin-left: auto; margin-bottom: 1em; margin-right: auto;
}}
.output thead {{ border-bottom: 1px solid gray; vertical-align: bottom; }}
.output td, .output th, .output tr {{
  vertical-align: middle; padding: 0.5em; line-height: normal; white-space: normal;
  max-width: none; border: none; text-align: right;
}}
.output tbody tr:nth-child(odd) {{ background: {0}; }}
.output tbody tr:nth-child(even) {{ background: {3}; }}
"""
"""What JupyterLab 4.6 says of tables (packages/rendermime/style/base.css), for one theme."""


@pytest.fixture
def channel() -> Iterator[Channel]:
    connection, other = socket.socketpair()
    with connection, other:
        yield Channel(connection)


def make_members(channel: Channel, hosts: Sequence[str], per_host: int) -> list[Member]:
    return [
        Member(
            rank=rank, host=hosts[rank // per_host], process=1000 + rank,
            device=f"cuda:{rank % per_host}", threads=4, backend="nccl", directory="",
            calls=channel, outputs=(),
        )
        for rank in range(len(hosts) * per_host)
    ]  # fmt: skip


def show(page: Page, theme: str, html: str) -> None:
    file = page.folder / f"{theme}.html"
    style = STYLE.format(*THEMES[theme])
    file.write_text(
        f"<!DOCTYPE html><meta charset=utf-8><title>Ranks</title><style>{style}</style>"
        f'<div class="output">{html}</div>',
        "utf-8",
    )
    page.visit(file.as_uri())


@pytest.mark.parametrize("theme", THEMES)
def test_each_rank_has_a_row_that_can_be_read(page: Page, channel: Channel, theme: str) -> None:
    members = make_members(channel, ["node1", "node2"], 2)
    show(page, theme, draw_ranks(members, "ended: rank 3 on node2 was lost", 3))
    assert page.texts("summary") == ["node1: ranks 0-1 ended", "node2: rank 2 ended, rank 3 lost"]
    shown = page.driver.find_element("css selector", ".output").text.split("\n")
    assert {"3 cuda:1 4 1003 lost", "0 cuda:0 4 1000 ended"} <= {
        " ".join(row.split()) for row in shown
    }
    found = page.run(browser.BOXES)
    assert found["texts"] > 30 and found["problems"] == []


def test_many_ranks_are_one_line_for_each_host(page: Page, channel: Channel) -> None:
    hosts = [f"node{number:02}" for number in range(1, 33)]
    show(page, "light", draw_ranks(make_members(channel, hosts, 8), "running train for 12 s"))
    height = "return document.documentElement.scrollHeight"
    assert page.run(height) < 32 * 30
    assert page.texts("summary")[31] == "node32: ranks 248-255 running train for 12 s"
    page.click("details:nth-of-type(32) summary")
    row = page.driver.find_element("css selector", "details:nth-of-type(32) tbody tr:last-child")
    assert row.text.split()[:4] == ["255", "cuda:7", "4", "1255"]


def test_nothing_is_run_or_fetched_and_names_are_text(channel: Channel) -> None:
    members = make_members(channel, ["<script>alert(1)</script>"], MOST_OPEN + 1)
    html = draw_ranks(members, "running <b> for 1 s")
    assert "<script" not in html and "<b>" not in html
    assert html.startswith(f"<div><strong>{MOST_OPEN + 1} ranks</strong>, running")
    assert "&lt;script&gt;" in html and "&lt;b&gt;" in html
    assert not any(word in html for word in ("src=", "href=", "url(", "http"))
