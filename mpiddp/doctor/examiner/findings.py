"""What a check found, and how the findings of many nodes become one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpiddp.errors import FAILURE, SUCCESS
from mpiddp.launch.launcher.hostnames import fold_hostnames
from mpiddp.wording import count_noun

PASS, SKIP, WARN, FAIL = "pass", "skip", "warn", "fail"
STATUSES = (PASS, SKIP, WARN, FAIL)
"""From good to bad; ``skip`` says why a check was not made."""

ORDER_OF_CODES = (3, 4, 2, 1)
"""A wrong launch explains everything that follows from it, and so on down."""

SHOWN = 4
"""How many different answers of nodes one line holds."""
MOST_PARTS = 8


@dataclass(frozen=True)
class Finding:
    """What one check found: on one node, or, merged, in the whole job."""

    check: str
    """Its name; the same in every version."""
    status: str
    """One of STATUSES."""
    found: str
    advice: str = ""
    """What to do; empty if nothing needs doing, or if ``found`` says it."""
    code: int = SUCCESS
    """Exit code (`mpiddp.errors`); 0 unless the status is ``fail``."""
    hosts: tuple[str, ...] = ()
    """The hosts that ``found`` is about; empty: all of them."""
    seconds: float | None = None
    """How long the part of the examination took that the check belongs to."""

    @property
    def text(self) -> str:
        return f"{self.found}. {self.advice}" if self.advice else self.found


def passed(check: str, found: str) -> Finding:
    return Finding(check, PASS, found)


def skipped(check: str, reason: str) -> Finding:
    return Finding(check, SKIP, reason)


def warned(check: str, found: str, advice: str) -> Finding:
    return Finding(check, WARN, found, advice)


def failed(check: str, found: str, advice: str = "", code: int = FAILURE) -> Finding:
    return Finding(check, FAIL, found, advice, code)


def merge(hostnames: Sequence[str], findings: Sequence[Finding]) -> Finding:
    """One finding from those of one check on all nodes, in the nodes' order.

    Nodes that agree are folded. If a node warns or fails, only such nodes are named; the line's
    status is the worst of theirs, its code that of the first failure by `exit_code`.
    """
    worst = max(findings, key=lambda finding: STATUSES.index(finding.status)).status
    named = [
        (hostname, finding)
        for hostname, finding in zip(hostnames, findings, strict=True)
        if finding.status in (WARN, FAIL) or worst in (PASS, SKIP)
    ]
    owners: dict[str, list[str]] = {}
    for hostname, finding in named:
        owners.setdefault(finding.found, []).append(hostname)
    everyone_agrees = len(owners) == 1 and worst in (PASS, SKIP)
    texts = [
        text if everyone_agrees else f"{fold_hostnames(names)}: {text}"
        for text, names in list(owners.items())[:SHOWN]
    ]
    if len(owners) > SHOWN:
        rest = [name for names in list(owners.values())[SHOWN:] for name in names]
        texts.append(f"something else again: {fold_hostnames(rest)}")
    advice = dict.fromkeys(finding.advice for _, finding in named if finding.advice)
    return Finding(
        check=findings[0].check,
        status=worst,
        found="; ".join(texts),
        advice=". ".join(advice),
        code=exit_code(finding for _, finding in named),
        hosts=() if worst in (PASS, SKIP) else tuple(dict.fromkeys(name for name, _ in named)),
    )


def join_some(parts: Sequence[str]) -> str:
    """The first few of ``parts``, and how many more there are."""
    more = [f"and {len(parts) - MOST_PARTS} more"] if len(parts) > MOST_PARTS else []
    return "; ".join([*parts[:MOST_PARTS], *more])


def describe_range(numbers: Sequence[int]) -> str:
    """``4``, ``2 to 4``."""
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def exit_code(findings: Iterable[Finding]) -> int:
    """The code of the first failure in the order 3, 4, 2, 1; 0 without one.

    A failure with any other code counts as 1.
    """
    codes = {finding.code for finding in findings if finding.status == FAIL}
    if not codes:
        return SUCCESS
    return next((code for code in ORDER_OF_CODES if code in codes), FAILURE)


def summarise(findings: Sequence[Finding], seconds: float) -> str:
    """``14 passed, 2 warnings, 1 failure (exit code 4) in 2.3 s``."""
    counts = {status: sum(f.status == status for f in findings) for status in STATUSES}
    parts = [f"{counts[PASS]} passed"]
    if counts[SKIP]:
        parts.append(f"{counts[SKIP]} skipped")
    parts.append(count_noun(counts[WARN], "warning"))
    parts.append(count_noun(counts[FAIL], "failure"))
    return f"{', '.join(parts)} (exit code {exit_code(findings)}) in {seconds:.1f} s"
