"""What the page of a report shows, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.show.charts import Section


@dataclass(frozen=True, kw_only=True)
class Highlight:
    """A result that is worth large letters."""

    title: str
    value: str
    text: str
    section: str


@dataclass(frozen=True)
class Fact:
    """What is known of each record's machine."""

    name: str
    texts: Sequence[str]
    must_agree: bool
    """Whether times cannot be compared if it differs."""

    @property
    def differs(self) -> bool:
        return self.must_agree and len(set(self.texts)) > 1


@dataclass(frozen=True, kw_only=True)
class Alert:
    """What a reader must know first."""

    text: str
    lines: Sequence[str] = ()
    is_bad: bool = True
    """A wrong result or a refusal; else a warning."""


@dataclass(frozen=True, kw_only=True)
class ReportPage:
    """All that the page shows."""

    heading: str
    words: str
    alerts: Sequence[Alert]
    highlights: Sequence[Highlight]
    sections: Sequence[Section]
    machines: Sequence[Fact]
    records: Sequence[str]
