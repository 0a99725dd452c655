"""``python -m mpiddp.plot RUN…``: curves and stage times of runs, as SVG, PNG or one HTML page."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.script.arguments import make_parser
from mpiddp.training.records.history import History, read_histories

DESCRIPTION = """\
Draw what runs have written to metrics.jsonl: loss, accuracy, learning rate, samples per second, and
the time of each stage of a step. RUN is a run's directory, or its name in --runs-dir. Runs that are
still going on can be drawn, too."""
SUFFIXES = (".svg", ".png", ".html")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the runs that the command line names."""
    with FailureHandler():
        values = read_arguments(sys.argv[1:] if arguments is None else arguments)
        draw_runs(values)
    print(f"Written: {values.output}")


def read_arguments(arguments: Sequence[str]) -> Namespace:
    """Raises ConfigurationError, and SystemExit(0) after ``--help``."""
    parser = make_parser("python -m mpiddp.plot", DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs.svg"),
        metavar="FILE",
        help="*.svg, *.png or *.html, one page that needs no other file (default: %(default)s)",
    )
    parser.add_argument(
        "--runs-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="directory that holds one directory per run (default: %(default)s)",
    )
    return parser.read(arguments, show_help=True)


def draw_runs(values: Namespace) -> None:
    """Write the picture. Raises ConfigurationError."""
    output: Path = values.output
    if output.suffix not in SUFFIXES:
        raise ConfigurationError(
            f"--output: expected a name that ends in {', '.join(SUFFIXES)}, found {output}"
        )
    picture = _render(read_histories(values.runs, values.runs_dir), output.suffix)
    try:
        output.write_bytes(picture)
    except OSError as error:
        raise ConfigurationError(f"cannot write {output}: {error.strerror}") from None


def _render(histories: Sequence[History], suffix: str) -> bytes:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("drawing needs matplotlib: pip install 'mpiddp[plot]'")
    from mpiddp.training.records import curves

    figure = curves.draw(histories)
    if suffix == ".html":
        return curves.render_page(figure, histories)
    return curves.render_svg(figure) if suffix == ".svg" else curves.render_png(figure)


if __name__ == "__main__":
    main()
