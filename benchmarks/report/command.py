"""``python -m benchmarks report RECORD… --html FILE``: the results of records on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.collectives import scaling
from benchmarks.common.checks import check_folder, check_outputs
from benchmarks.common.options import File, Load, make_reader
from benchmarks.common.results import describe_heading
from benchmarks.report.assembly import assemble
from benchmarks.report.material import read_material
from benchmarks.report.page import draw_report
from benchmarks.report.slides import write_slides
from mpiddp.errors import ConfigurationError
from mpiddp.files import write_whole
from mpiddp.options.fields import Argument, pick
from mpiddp.wording import count_noun, print_text


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is read, and what is written."""

    records: Annotated[tuple[Path, ...], Argument("RECORD", Path, is_positional=True)]
    """Files that --json FILE wrote."""
    html: File = None
    """Write one page, which needs no network."""
    png: Annotated[Path | None, Argument("DIR")] = None
    """Write each picture into a directory, for slides."""
    output: File = None
    """Draw collectives over sizes beside the same over ranks (.svg, .png or .pdf)."""
    load: Load = ()
    """Algorithms of your own, to show how they work: Python files or plans."""
    fit: File = None
    """Model that fit wrote, for predictions and lower bounds (default: fitted to the records'
    point-to-point, if they have it)."""

    def __post_init__(self) -> None:
        if self.html is None and self.png is None and self.output is None:
            raise ConfigurationError("nothing to write: give --html FILE, --png DIR, or both")


READER = make_reader(
    command="report",
    description="Draw the results of records: wrong and missing results, the fastest contender by "
    "ranks and size, curves, bars, and the machines.",
    groups={"options": Options},
)


def main(arguments: Sequence[str]) -> None:
    options = pick(Options, READER.read(arguments))
    check_outputs(options.html, plot=options.output, inputs=(*options.records, options.fit))
    if options.png is not None:
        check_folder(options.png)
    material = read_material(options.records)
    if options.output is not None:
        cells = [each.cell for each in material.cells]
        scaling.draw(options.output, cells, describe_heading(material.records[0].environment))
        print_text(f"wrote {options.output}")
    report = assemble(material, options.fit)
    if options.html is not None:
        write_whole(options.html, draw_report(report))
        print_text(f"wrote {options.html}")
    if options.png is not None:
        count = write_slides(options.png, report)
        print_text(f"wrote {count_noun(count, 'picture')} into {options.png}")
