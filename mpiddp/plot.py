"""``python -m mpiddp.plot RUN…``: curves and stage times of runs, as SVG, PNG or one HTML page."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp.errors import ConfigurationError
from mpiddp.files import write_whole
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.options.checks import check
from mpiddp.options.fields import Argument
from mpiddp.options.reader import read
from mpiddp.training.records.history import History, read_histories
from mpiddp.wording import print_text

DESCRIPTION = """\
Draw what runs have written to metrics.jsonl: loss, accuracy, learning rate, samples per second, and
the time of each stage of a step. RUN is a run's directory, or its name in --runs-dir. Runs that are
still going on can be drawn, too."""
SUFFIXES = (".svg", ".png", ".html")


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What is drawn."""

    runs: Annotated[tuple[str, ...], Argument("RUN", is_positional=True)]

    output: Annotated[Path, Argument("FILE")] = Path("runs.svg")
    """*.svg, *.png or *.html, one page that needs no other file."""

    runs_dir: Annotated[Path, Argument("DIR")] = Path("runs")
    """Directory that holds one directory per run."""

    def __post_init__(self) -> None:
        expected = f"a name that ends in {', '.join(SUFFIXES)}"
        check("output", self.output.suffix in SUFFIXES, expected, self.output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the runs that the command line names."""
    words = sys.argv[1:] if arguments is None else arguments
    with FailureHandler():
        options = read(PlotOptions, words, "python -m mpiddp plot", DESCRIPTION)
        print_text(draw_runs(options))


def draw_runs(options: PlotOptions) -> str:
    """Write the picture, and return what there is to say. Raises ConfigurationError."""
    output = options.output
    histories = read_histories(options.runs, options.runs_dir)
    picture = _render(histories, output.suffix)
    try:
        write_whole(output, picture)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}") from None
    points = [each.label for each in histories if len(each.rows) == 1 and not each.steps]
    advice = f"; one epoch is one point ({', '.join(points)}): train with --log-every N for a curve"
    return f"Written: {output}{advice if points else ''}"


def _render(histories: Sequence[History], suffix: str) -> bytes:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("drawing needs matplotlib: pip install 'mpiddp[plot]'")
    from mpiddp.training.records import curves

    if suffix == ".html":
        return curves.render_page(histories)
    figure = curves.draw(histories)
    return curves.render_svg(figure) if suffix == ".svg" else curves.render_png(figure)


if __name__ == "__main__":
    main()
