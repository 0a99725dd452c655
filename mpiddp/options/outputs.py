"""``--output FILE``: the files that a command writes; the name's ending says which kind of file.

    output: Annotated[Outputs, writes(RECORD, PICTURE)] = ()

A command declares its kinds there, calls `check_outputs` before it begins to work, and takes the
files of a kind by `find`.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import quote
from mpiddp.options.fields import Argument


@dataclass(frozen=True)
class Kind:
    """A kind of file, and the endings of its names."""

    name: str
    """In words."""
    endings: tuple[str, ...]
    is_drawn: bool = False
    """Whether matplotlib draws it; then one run may write one file of each ending."""

    def __str__(self) -> str:
        listed = " or ".join(filter(None, [", ".join(self.endings[:-1]), self.endings[-1]]))
        return f"{listed} ({self.name})"


FOLDER = "/"
"""The ending of a directory's name; one that is there may be named without it."""
RECORD = Kind("record", (".jsonl",))
TABLE = Kind("table", (".csv",))
PICTURE = Kind("picture", (".svg", ".png", ".pdf"), is_drawn=True)
PAGE = Kind("page", (".html",))
OTHER_NAMES = {
    **dict.fromkeys(("-o", "--out", "--outfile", "--output-file", "--file", "--save", "--format")),
    **{f"--{form}": f".{form}" for form in ("csv", "html", "pdf", "png", "svg", "xml")},
    **dict.fromkeys(("--plot", "--picture", "--figure"), ".svg"),
    "--json": ".jsonl",
    "--nccl-tests": ".txt",
    "--nccl-csv": ".conf",
}
"""What other programs call this option, and the ending of the file that each means, if one."""


@dataclass(frozen=True)
class Output:
    """A file that is to be written."""

    path: Path
    kind: Kind

    def __str__(self) -> str:
        return str(self.path)


Outputs = tuple[Output, ...]


def writes(*kinds: Kind) -> Argument:
    """The mark of the option, for a command that can write these kinds."""
    known = ", ".join(map(str, kinds))

    def read(text: str) -> Output:
        path = Path(text)
        is_folder = text.endswith(FOLDER) or path.is_dir()
        name = path.name.lower()
        for kind in kinds:
            if is_folder and FOLDER in kind.endings:
                return Output(path, kind)
        for kind in () if text.endswith(FOLDER) else kinds:
            if any(name.endswith(ending) and name != ending for ending in kind.endings):
                return Output(path, kind)
        raise ValueError(f"expected a name that ends in {known}, found {quote(text)}")

    endings = [ending for kind in kinds for ending in kind.endings]
    others = {name: end if end in endings else "" for name, end in OTHER_NAMES.items()}
    others["--json"] = others["--json"] or ".json" * (".json" in endings)
    return Argument(
        "FILE",
        read,
        is_repeated=True,
        more=f"FILE ends in {known}" + "; may be given several times" * (len(endings) > 1),
        other_names=tuple((name, f"FILE{end}") for name, end in others.items()),
    )


def find(outputs: Iterable[Output], kind: Kind) -> list[Path]:
    """The files of a kind; at most one, unless it is drawn."""
    return [each.path for each in outputs if each.kind is kind]


def find_one(outputs: Iterable[Output], kind: Kind) -> Path | None:
    """The file of a kind of which there is at most one."""
    return next(iter(find(outputs, kind)), None)


def check_outputs(outputs: Outputs, inputs: Iterable[Path | None] = ()) -> None:
    """Raise ConfigurationError unless each file can be written.

    ``inputs`` are read: no output may replace them. Nothing is left behind: who writes into a
    directory makes it.
    """
    read = {path.resolve() for path in inputs if path is not None}
    written: set[Path] = set()
    for number, output in enumerate(outputs):
        path = output.path
        _check_room(path, is_folder=FOLDER in output.kind.endings)
        if path.resolve() in read:
            raise ConfigurationError(f"{path} is read, and would be overwritten: name another file")
        for other in outputs[:number]:
            is_other_form = path.suffix.lower() != other.path.suffix.lower()
            if other.kind is output.kind and not (output.kind.is_drawn and is_other_form):
                raise ConfigurationError(
                    f"--output {other} and --output {path} are both {output.kind}: give one"
                )
        if path.resolve() in written:
            raise ConfigurationError(f"{path} is named twice as --output: name another file")
        written.add(path.resolve())
        if output.kind.is_drawn:
            check_matplotlib()


def check_matplotlib() -> None:
    """Raise ConfigurationError if it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("drawing needs matplotlib: pip install 'mpiddp[plot]'")


def _check_room(path: Path, *, is_folder: bool) -> None:
    if not is_folder and path.is_dir():
        raise ConfigurationError(f"{path} is a directory: expected the name of a file")
    if not is_folder and not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: there is no directory {path.parent}")
    place = path if is_folder else path.parent
    while not os.path.lexists(place):
        place = place.parent
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
