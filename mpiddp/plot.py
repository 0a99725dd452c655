"""``python -m mpiddp.plot RUN…``: curves and stage times of runs, as SVG, PNG or one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp.errors import ConfigurationError
from mpiddp.files import write_whole
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.options.fields import Argument
from mpiddp.options.outputs import Kind, Output, Outputs, check_outputs, find, writes
from mpiddp.options.reader import read
from mpiddp.training.records.history import History, read_histories
from mpiddp.wording import print_text

DESCRIPTION = """\
Draw what runs have written to metrics.jsonl: loss, accuracy, learning rate, samples per second, and
the time of each stage of a step. RUN is a run's directory, or its name in --runs-dir. Runs that are
still going on can be drawn, too."""
DRAWING = Kind("picture", (".svg", ".png", ".html"), is_drawn=True)
USUAL = (Output(Path("runs.svg"), DRAWING),)


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """What is drawn."""

    runs: Annotated[tuple[str, ...], Argument("RUN", is_positional=True)]

    output: Annotated[Outputs, writes(DRAWING)] = USUAL
    """Where it is drawn; .html is a page that needs no other file."""

    runs_dir: Annotated[Path, Argument("DIR")] = Path("runs")
    """Directory that holds one directory per run."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the runs that the command line names."""
    with FailureHandler():
        options = read(PlotOptions, arguments, "python -m mpiddp plot", DESCRIPTION)
        print_text(draw_runs(options))


def draw_runs(options: PlotOptions) -> str:
    """Write the picture, and return what there is to say. Raises ConfigurationError."""
    check_outputs(options.output)
    histories = read_histories(options.runs, options.runs_dir)
    for path in find(options.output, DRAWING):
        picture = _render(histories, path.suffix.lower())
        try:
            write_whole(path, picture)
        except OSError as error:
            raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None
    points = [each.label for each in histories if len(each.rows) == 1 and not each.steps]
    advice = f"; one epoch is one point ({', '.join(points)}): train with --log-every N for a curve"
    return f"Written: {', '.join(map(str, options.output))}{advice if points else ''}"


def _render(histories: Sequence[History], suffix: str) -> bytes:
    from mpiddp.training.records import curves

    if suffix == ".html":
        return curves.render_page(histories)
    figure = curves.draw(histories)
    return curves.render_svg(figure) if suffix == ".svg" else curves.render_png(figure)


if __name__ == "__main__":
    main()
