"""``%load_ext mpiddp`` in IPython and Jupyter: cells that run on ranks, and how errors look there.

    %load_ext mpiddp
    ranks = mpiddp.ranks(4)

    %%ranks
    print(torch.distributed.get_rank())

Nothing here imports IPython: it is what calls.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.process.streams.output import ALL, parse_ranks
from mpiddp.remote.cell import Cell
from mpiddp.remote.ranks import Ranks
from mpiddp.wording import fold_numbers

OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))
FOREIGN = f"{os.sep}IPython{os.sep}core{os.sep}"
"""In the path of IPython's own files."""
MAGIC_CALL = "get_ipython().run_cell_magic("


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext mpiddp``."""
    magics = CellMagics(shell)
    shell.register_magic_function(magics.run_on_all, "cell", "ranks")
    shell.register_magic_function(magics.run_on_some, "cell", "rank")
    shell.set_custom_exc((MpiddpError,), show_error)


class CellMagics:
    """``%%ranks`` and ``%%rank`` of one IPython shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def run_on_all(self, line: str, cell: str) -> CellValues | None:
        """Run this cell on every rank.

            %%ranks [NAME]

        Its names last: the next such cell finds them on each rank (in the module ``__main__``).
        They are not those of the notebook. What ranks print appears here, and the value of the
        last expression by rank, equal ones once.

        NAME is the variable that holds the ranks, if there are several.
        """
        __tracebackhide__ = True
        ranks = find_ranks(self._shell.user_ns, line.strip())
        return self._run(ranks, frozenset(range(len(ranks))), f"%%ranks {line}", cell)

    def run_on_some(self, line: str, cell: str) -> CellValues | None:
        """Run this cell on some ranks; the others wait until it is done.

            %%rank 0 [NAME]
            %%rank 0,2-3 [NAME]

        As ``%%ranks``. A collective call in it waits for the ranks that do not make it, until its
        time is up or Ctrl-C.
        """
        __tracebackhide__ = True
        numbers, _, name = line.strip().partition(" ")
        ranks = find_ranks(self._shell.user_ns, name.strip())
        return self._run(ranks, read_numbers(numbers, len(ranks)), f"%%rank {line}", cell)

    def _run(
        self, ranks: Ranks, chosen: frozenset[int], first_line: str, text: str
    ) -> CellValues | None:
        """The cell's first line is a comment there, so that lines have the notebook's numbers."""
        __tracebackhide__ = True
        # IPython counts on at the beginning or at the end of a cell, by its release.
        name = f"In[{len(self._shell.history_manager.input_hist_parsed) - 1}]"
        try:
            cell = Cell.compile(f"# {first_line}\n{text}", name, chosen)
        except SyntaxError as error:
            raise ConfigurationError(
                f"line {error.lineno} of this cell: {error.msg}: {(error.text or '').strip()}"
            ) from None
        values = CellValues(tuple(ranks.run(cell)))
        return values if values else None


@dataclass(frozen=True)
class CellValues:
    """The values of a cell's last expression; IPython shows its ``repr``."""

    texts: tuple[str | None, ...]
    """By rank; None if a rank has none."""

    def __bool__(self) -> bool:
        return any(text is not None for text in self.texts)

    def __repr__(self) -> str:
        groups: dict[str, list[int]] = {}
        for rank, text in enumerate(self.texts):
            if text is not None:
                groups.setdefault(text, []).append(rank)
        labels = {text: f"[{fold_numbers(ranks)}] " for text, ranks in groups.items()}
        return "\n".join(
            label + text.replace("\n", "\n" + " " * len(label)) for text, label in labels.items()
        )


def find_ranks(namespace: Mapping[str, Any], name: str) -> Ranks:
    """The ranks that a variable holds; without a name, the only ones that are open.

    Raises ConfigurationError.
    """
    held = {
        key: value
        for key, value in list(namespace.items())
        if isinstance(value, Ranks) and not key.startswith("_")
    }
    if name:
        if name not in held:
            raise ConfigurationError(f"{name} holds no ranks: write {name} = mpiddp.ranks(4)")
        return held[name]
    found = {key: value for key, value in held.items() if value.state != "closed"}
    if not found:
        raise ConfigurationError("there are no ranks yet: write ranks = mpiddp.ranks(4)")
    if len({id(value) for value in found.values()}) > 1:
        raise ConfigurationError(f"several hold ranks: name one of {', '.join(found)}")
    return next(iter(found.values()))


def read_numbers(text: str, size: int) -> frozenset[int]:
    """The ranks that ``0,2-3`` means. Raises ConfigurationError if there are no such ranks."""
    parts = parse_ranks(text, "%%rank")
    if text != ALL and any(part.stop > size for part in parts):
        raise ConfigurationError(f"%%rank {text}: there are ranks {fold_numbers(range(size))}")
    return frozenset(rank for rank in range(size) if any(rank in part for part in parts))


def show_error(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> Sequence[str]:
    """Show the lines of the notebook that led to an error, and what it says; return that."""
    frames = [frame for frame in traceback.extract_tb(trace) if _is_of_user(frame)]
    lines = traceback.format_list(frames)
    lines += traceback.format_exception(kind, error.with_traceback(None), None, chain=False)
    text = re.sub(r'File "([^"\n]+)", line', lambda match: _name_cell(shell, match), "".join(lines))
    shown = text.replace(f"{MpiddpError.__module__}.", "").rstrip().splitlines()
    shell._showtraceback(kind, error, shown)
    return shown


def _is_of_user(frame: traceback.FrameSummary) -> bool:
    is_foreign = frame.filename.startswith(OWN_FOLDER) or FOREIGN in frame.filename
    return not is_foreign and not (frame.line or "").startswith(MAGIC_CALL)


def _name_cell(shell: Any, match: re.Match[str]) -> str:
    """``Cell In[3], line`` for the files of cells: IPython's, and those of cells on ranks."""
    named = shell.compile.format_code_name(match[1])
    name = named[1] if named else match[1]
    return f"Cell {name}, line" if name.startswith("In[") else match[0]
