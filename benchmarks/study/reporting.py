"""``python -m benchmarks report RECORD… --output FILE``: the results of records on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from benchmarks.records.environment import describe_heading
from benchmarks.records.material import read_material
from benchmarks.records.options import File, Load, make_reader
from benchmarks.records.schema import Record
from benchmarks.show.page.assembly import assemble
from benchmarks.show.page.page import draw_report
from benchmarks.show.pictures import write_slides
from benchmarks.show.scaling import write_scaling
from mpiddp.errors import ConfigurationError
from mpiddp.files import write_whole
from mpiddp.options.fields import Argument, pick
from mpiddp.options.outputs import FOLDER, PICTURE, Kind, Outputs, check_outputs, find, writes
from mpiddp.wording import count_noun, print_text

PAGE = Kind("page", (".html",), is_drawn=True)
SLIDES = Kind("directory of pictures", (FOLDER,), is_drawn=True)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What is read, and what is written."""

    records: Annotated[tuple[Path, ...], Argument("RECORD", Path, is_positional=True)]
    """Records that the other commands wrote."""
    output: Annotated[Outputs, writes(PAGE, SLIDES, PICTURE)]
    """Write one page, which needs no network; each picture as PNG into a directory, for slides; or
    one picture of collectives over sizes beside the same over ranks."""
    load: Load = ()
    """Algorithms of your own, to show how they work: Python files or plans."""
    fit: File = None
    """Model that fit wrote, for predictions and lower bounds (default: fitted to the records'
    point-to-point, if they have it)."""


READER = make_reader(
    command="report",
    description="Draw the results of records: wrong and missing results, the fastest contender by "
    "ranks and size, curves, bars, and the machines.",
    groups={"options": ReportOptions},
)


def main(arguments: Sequence[str]) -> None:
    options = pick(ReportOptions, READER.read(arguments))
    check_outputs(options.output, inputs=(*options.records, options.fit))
    material = read_material(options.records)
    for path in find(options.output, PICTURE):
        cells = [(each.name, each.cell) for each in material.cells]
        write_scaling(path, cells, describe_heading(_find_machine(material.records)))
        print_text(f"wrote {path}")
    if len(options.output) == len(find(options.output, PICTURE)):
        return
    report = assemble(material, options.fit)
    for path in find(options.output, PAGE):
        write_whole(path, draw_report(report))
        print_text(f"wrote {path}")
    for path in find(options.output, SLIDES):
        path.mkdir(parents=True, exist_ok=True)
        count = write_slides(path, report.sections)
        print_text(f"wrote {count_noun(count, 'picture')} into {path}")


def _find_machine(records: Sequence[Record]) -> Mapping[str, Any]:
    """The first record's environment. Raises ConfigurationError if they are of several machines."""
    environments = [each.environment for each in records]
    machines = {f"{each.get('processor')}, {each.get('cores')} cores" for each in environments}
    if len(machines) > 1:
        raise ConfigurationError(
            f"expected records of one machine in a picture, found {'; '.join(sorted(machines))}"
        )
    return records[0].environment
