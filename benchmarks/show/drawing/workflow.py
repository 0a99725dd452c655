"""A training step as every rank takes it: what it computes, what it sends, and what overlaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from benchmarks.records.options import describe_seconds

COMPUTES, SENDS = "computes", "communicates"
MARKS = {COMPUTES: "█", SENDS: "▒"}
WORDS = {
    "forward": "the loss of the rank's own batch",
    "backward k": "the gradients of bucket k, those of the last layers first",
    "bucket k": "its sum over all ranks, while backward goes on: the mean of their gradients",
    "update": "the optimizer, which all ranks give the same gradients, so that weights stay alike",
}


@dataclass(frozen=True)
class Span:
    """What goes on from ``begin`` to ``end``, in seconds."""

    name: str
    lane: str
    """COMPUTES or SENDS: at most one of each at a time."""
    begin: float
    end: float


@dataclass(frozen=True)
class TrainingStep:
    """Seconds of a step whose backward takes twice as long as its forward, as of its products."""

    compute: float
    """Of forward and backward together."""
    syncs: tuple[float, ...]
    """Of each bucket; all have the same share of backward."""
    update: float

    def plan(self, *, overlaps: bool = True) -> list[Span]:
        """A bucket goes once it is full and the one before is through; or all after backward."""
        forward, part = self.compute / 3, 2 * self.compute / 3 / len(self.syncs)
        ready = [forward + number * part for number in range(len(self.syncs) + 1)]
        spans = [Span("forward", COMPUTES, 0.0, forward)]
        free = 0.0 if overlaps else self.compute
        for number, begin, end, seconds in zip(
            count(1), ready, ready[1:], self.syncs, strict=False
        ):
            spans.append(Span(f"backward {number}", COMPUTES, begin, end))
            free = max(free, end)
            spans.append(Span(f"bucket {number}", SENDS, free, free + seconds))
            free += seconds
        return [*spans, Span("update", COMPUTES, free, free + self.update)]

    def describe(self, width: int) -> Iterator[str]:
        """Lines of text: a row for each span, and what overlapping saves."""
        spans, alone = self.plan(), self.plan(overlaps=False)
        for name, text in WORDS.items():
            yield f"{name:<12}{text}"
        yield ""
        scale = max(width - 36, 20) / spans[-1].end
        for span in spans:
            begin, end = round(span.begin * scale), round(span.end * scale)
            times = f"{describe_seconds(span.begin):>9} – {describe_seconds(span.end):<9}"
            yield f"{span.name:<13}{times} {' ' * begin}{MARKS[span.lane] * max(1, end - begin)}"
        yield ""
        hidden = alone[-1].end - spans[-1].end
        parts = {
            "modelled": spans[-1].end,
            "forward, backward": self.compute,
            "synchronisation": sum(self.syncs),
            "  of it hidden": hidden,
            "  of it exposed": sum(self.syncs) - hidden,
            "update": self.update,
            "without overlap": alone[-1].end,
        }
        for name, seconds in parts.items():
            yield f"  {name:19}{describe_seconds(seconds)}"
