"""What all drawings share: the sheet, the colours, the look of axes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
"""Of lines: Okabe and Ito's, which colour-blind eyes can tell apart."""


@contextlib.contextmanager
def open_figure(
    path: Path, width: float, height: float, title: str, note: str = ""
) -> Iterator[Figure]:
    """An empty figure of so many inches, which is written to ``path`` at the end of the block."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.suptitle(title, fontsize=12)
    if note:
        figure.supxlabel(note, fontsize=7, color="#555555")
    figure.savefig(path, dpi=150)


def add_legend(figure: Figure, axis: Axes) -> None:
    """The legend of all panels, which is that of one of them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)


def finish_lines(axis: Axes) -> None:
    axis.grid(color="#eeeeee", lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def finish_bars(axis: Axes, names: Sequence[str], size: float = 9) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=size)
    axis.invert_yaxis()
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def write_beside(axis: Axes, text: str, x: float, place: int) -> None:
    axis.annotate(
        text, (x, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8
    )
