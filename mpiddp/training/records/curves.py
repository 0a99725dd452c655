"""Draws what runs have reported: loss, accuracy, rates, and the time of each stage."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import fmean
from string import Template
from typing import TYPE_CHECKING, Any

from mpiddp.training.records.history import STAGES, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
"""Okabe and Ito's, which colour-blind eyes can tell apart."""
STAGE_COLOURS = dict(
    zip(
        STAGES,
        ("#e69f00", "#f0e442", "#999999", "#56b4e9", "#0072b2", "#d55e00", "#009e73"),
        strict=True,
    )
)
INK, GRID = "#1b222c", "#eeeeee"
SETTINGS: dict[Any, str] = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
)
"""Of matplotlib, for pages."""
WIDTH, LINE = 125, 8
"""Characters beside each other in the legend; and those that a line before them takes."""
MANY = 20
"""Epochs whose points are too close to be marked."""
FINEST = 500
"""Points of a curve within epochs; of more, some are averaged."""
PANELS = (
    ("Loss", ("loss", "test_loss")),
    ("Accuracy, %", ("accuracy", "test_accuracy")),
    ("Top-5 accuracy, %", ("top5_accuracy", "test_top5_accuracy")),
    ("Perplexity", ("perplexity", "test_perplexity")),
    ("Learning rate", ("learning_rate",)),
    ("Samples per second", ("samples_per_second",)),
)
"""Title of a panel, and what it shows: of training, and of the test."""
SUMMARY = {
    "Epochs": ("epoch", "{:.0f}"),
    "Loss": ("loss", "{:.4f}"),
    "Accuracy": ("accuracy", "{:.2%}"),
    "Test loss": ("test_loss", "{:.4f}"),
    "Test accuracy": ("test_accuracy", "{:.2%}"),
    "Samples per second": ("samples_per_second", "{:,.0f}"),
}
"""Columns of the page's table: the last value of each."""


def draw(histories: Sequence[History]) -> Figure:
    """A figure with a panel for each thing that some run has reported."""
    from matplotlib.figure import Figure

    panels, timed = _list_panels(histories), _list_timed(histories)
    heights = [2.7] * -(-len(panels) // 2)
    if timed:
        heights.append(2.7 if len(timed) == 1 else 0.9 + 0.5 * len(timed))
    figure = Figure(figsize=(10, 0.6 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for number, (title, names) in enumerate(panels):
        is_alone = number == len(panels) - 1 and number % 2 == 0
        place = slice(None) if is_alone else number % 2
        axis = figure.add_subplot(grid[number // 2, place])
        _draw_curves(axis, histories, title, names)
    _add_legend(figure, histories)
    if timed:
        axis = figure.add_subplot(grid[-1, :])
        _draw_stages(axis, timed)
        axis.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(STAGES),
            fontsize=8,
            frameon=False,
            handlelength=1,
            columnspacing=1,
        )
    return figure


def _list_panels(histories: Sequence[History]) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (title, names)
        for title, names in PANELS
        if any(
            history.find_values(name) or history.find_curve(name)
            for history in histories
            for name in names
        )
    ]


def _list_timed(histories: Sequence[History]) -> list[History]:
    return [history for history in histories if history.find_stages()]


def render_svg(figure: Figure) -> bytes:
    from matplotlib import rc_context

    file = io.BytesIO()
    # Texts stay texts, which can be searched. The salt makes the same figure the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mpiddp"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def render_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def render_page(histories: Sequence[History]) -> bytes:
    """One HTML file that needs no other: a table of the runs, and a picture for each panel."""
    from matplotlib import rc_context

    with rc_context(SETTINGS):
        figures = [
            _draw_alone(2.6, _draw_curves, histories, *panel) for panel in _list_panels(histories)
        ]
        if timed := _list_timed(histories):
            height = 2.6 if len(timed) == 1 else 0.7 + 0.45 * len(timed)
            figures.append(_draw_alone(height, _draw_stages, timed))
        pictures = list(map(_render_part, figures))
    runs = dict(zip([each.label for each in histories], _list_colours(histories), strict=True))
    stages = {name: colour for name, colour in STAGE_COLOURS.items() if timed}
    several = f"{len(histories)} runs" if len(histories) > 1 else histories[0].label
    tests = any(history.find_values("test_loss") for history in histories)
    words = " Solid lines: training; dashed lines: test." if tests else ""
    return _PAGE.substitute(
        title=escape(", ".join(runs)),
        heading=escape(several),
        words=f"What training has reported, by epoch.{words}",
        head="".join(f"<th>{escape(name)}</th>" for name in SUMMARY),
        body="".join(_make_line(history) for history in histories),
        runs=_make_legend(runs if len(runs) > 1 else {}),
        figures="".join(f"<figure>{picture}</figure>" for picture in pictures),
        stages=_make_legend(stages),
    ).encode()


def _draw_alone(height: float, paint: Callable[..., object], *words: Any) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, height), layout="constrained", facecolor="none")
    paint(figure.add_subplot(), *words)
    return figure


def _render_part(figure: Figure) -> str:
    """An element whose colours of paper, ink and lines are the page's."""
    svg = render_svg(figure).decode()
    svg = svg[svg.index("<svg") :]
    for colour, name in {INK: "ink", "#000000": "ink", "#ffffff": "surface", GRID: "line"}.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def _make_legend(colours: Mapping[str, str]) -> str:
    items = (
        f'<li><i style="background: {_adapt(colour)}"></i>{escape(name)}</li>'
        for name, colour in colours.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>' if colours else ""


def _adapt(colour: str) -> str:
    return "var(--ink)" if colour == "#000000" else colour


def _make_line(history: History) -> str:
    cells = []
    for name, text in SUMMARY.values():
        values = history.find_values(name)
        cells.append(text.format(values[-1][1]) if values else "–")
    joined = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><th>{escape(history.label)}</th>{joined}</tr>"


def _list_colours(histories: Sequence[History]) -> list[str]:
    count = len(histories)
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    # Without its ends, which are hard to see on black and on white.
    return [
        to_hex(colormaps["viridis"](0.25 + 0.6 * place / (count - 1))) for place in range(count)
    ]


def _draw_curves(
    axis: Axes, histories: Sequence[History], title: str, names: Sequence[str]
) -> None:
    scale = 100 if title.endswith("%") else 1
    for history, colour in zip(histories, _list_colours(histories), strict=True):
        for name, style in zip(names, ("-", "--"), strict=False):
            points = history.find_values(name)
            if fine := _average(history.find_curve(name)):
                places, values = zip(*fine, strict=True)
                scaled = [scale * value for value in values]
                axis.plot(places, scaled, color=colour, linewidth=0.8, alpha=0.6)
            if not points:
                continue
            marks = style == "--" or len(points) <= MANY
            axis.plot(
                [epoch for epoch, _ in points],
                [scale * value for _, value in points],
                style,
                color=colour,
                linewidth=1.6,
                marker="o" if marks else None,
                markersize=4,
                markerfacecolor="white" if style == "--" else colour,
            )
    if title.startswith("Samples"):
        axis.set_ylim(0, 1.05 * axis.dataLim.y1 or 1)
    axis.set_title(title, fontsize=10, loc="left")
    _finish(axis)
    axis.grid(color=GRID, linewidth=0.6)


def _average(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `FINEST` points: the means of as many neighbours each."""
    size = -(-len(points) // FINEST) or 1
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def _finish(axis: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("Epoch", fontsize=8)
    is_within_one = axis.dataLim.x0 < 1 >= axis.dataLim.x1
    axis.xaxis.set_major_locator(MaxNLocator(integer=not is_within_one, min_n_ticks=1))
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)


def _add_legend(figure: Figure, histories: Sequence[History]) -> None:
    from matplotlib.lines import Line2D

    colours = _list_colours(histories)
    lines = [
        Line2D([], [], color=colour, linewidth=2, label=history.label)
        for history, colour in zip(histories, colours, strict=True)
    ]
    if any(history.find_values("test_loss") for history in histories):
        lines.append(Line2D([], [], color="#555555", label="training"))
        test = Line2D([], [], color="#555555", linestyle="--", label="test")
        test.set(marker="o", markersize=4, markerfacecolor="white")
        lines.append(test)
    labels = [str(line.get_label()) for line in lines]
    figure.legend(
        handles=lines,
        loc="outside upper center",
        ncols=max(1, min(len(lines), WIDTH // (LINE + max(map(len, labels))))),
        fontsize=9,
        frameon=False,
    )


def _draw_stages(axis: Axes, histories: Sequence[History]) -> None:
    _draw_epochs(axis, histories[0]) if len(histories) == 1 else _draw_runs(axis, histories)


def _draw_epochs(axis: Axes, history: History) -> None:
    """A stack of stages for each epoch."""
    stages = [each for _, each in history.find_stages()]
    epochs = [epoch for epoch, _ in history.find_stages()]
    _stack_stages(axis, axis.bar, epochs, stages, 0.8 if len(stages) <= MANY else 1.0)
    axis.set_xlim(min(epochs) - 0.6, max(epochs) + 0.6)
    axis.grid(axis="y", color=GRID, linewidth=0.6)


def _draw_runs(axis: Axes, histories: Sequence[History]) -> None:
    """A stack of stages for each run: the mean over its epochs. Names stand above the bars."""
    means = []
    for history in histories:
        stages = [each for _, each in history.find_stages()]
        means.append({name: sum(each[name] for each in stages) / len(stages) for name in STAGES})
    _stack_stages(axis, axis.barh, range(len(means)), means, 0.4)
    axis.set_xlabel("")
    axis.set_yticks([])
    for place, history in enumerate(histories):
        axis.annotate(
            history.label, (0, place - 0.25), (2, 0), textcoords="offset points",
            fontsize=8, parse_math=False,
        )  # fmt: skip
    axis.set_ylim(len(means) - 0.6, -0.8)
    axis.grid(axis="x", color=GRID, linewidth=0.6)


def _stack_stages(
    axis: Axes,
    draw: Callable[..., object],
    places: Sequence[int],
    rows: Sequence[Mapping[str, float]],
    width: float,
) -> None:
    """Draw a stack of bars for each row, at these places; with title and legend."""
    base = [0.0] * len(rows)
    for name in STAGES:
        values = [row[name] for row in rows]
        if any(value > 0 for value in values):
            draw(places, values, width, base, color=STAGE_COLOURS[name], label=name)
            base = [a + b for a, b in zip(base, values, strict=True)]
    axis.set_title("Milliseconds of a step, by stage", fontsize=10, loc="left")
    _finish(axis)


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root {
  color-scheme: light dark; --page: #f7f7f5; --surface: #ffffff; --ink: #1b222c; --quiet: #55606e;
  --line: #d9dcdf;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #12161c; --surface: #1a2029; --ink: #e8ebf0; --quiet: #a7b1bf; --line: #333c49; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem clamp(0.75rem, 2.5vw, 2rem) 3rem; max-width: 75rem;
  background: var(--page); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums;
}
h1 { margin: 0; font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
p { margin: 0.35rem 0 1.25rem; color: var(--quiet); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td {
  padding: 0.25rem 0.8rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line);
}
thead th { color: var(--quiet); }
th:first-child { padding-left: 0; text-align: left; }
tbody th { min-width: 7rem; white-space: normal; overflow-wrap: anywhere; }
.legend {
  display: flex; flex-wrap: wrap; gap: 0.3rem 1.25rem; margin: 1.25rem 0; padding: 0;
  list-style: none; font-size: 0.85rem; overflow-wrap: anywhere;
}
.legend i {
  display: inline-block; width: 0.9rem; height: 0.9rem; margin-right: 0.4rem;
  vertical-align: -0.1rem;
}
main {
  display: grid; gap: 1rem; margin-top: 1.25rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
}
figure {
  margin: 0; min-width: 0; padding: 0.5rem; border: 1px solid var(--line); border-radius: 0.6rem;
  background: var(--surface);
}
svg { display: block; width: 100%; height: auto; }
</style>
</head>
<body>
<header>
  <h1>$heading</h1>
  <p>$words</p>
</header>
<div class="scroll" tabindex="0"><table>
<thead><tr><th>Run</th>$head</tr></thead>
<tbody>$body</tbody>
</table></div>
$runs
<main>$figures</main>
$stages
</body>
</html>
""")
