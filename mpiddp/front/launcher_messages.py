"""What launchers write to standard error, without what repeats a rank's own report.

Open MPI and MPICH comment on each rank that called MPI_Abort or left with an exit code. That rank
has said why, in one message, and twenty lines that follow would bury it. So would torch's warning,
with its C++ stack, that rank 0's store does not answer, if a rank has reported the end of the job.
Everything else passes: errors of the launch, ranks that were killed, and what another rank
says inside such a paragraph.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Callable
from typing import IO

PATIENCE_SECONDS = 1.0
"""How long a line without an end is held back that may become a launcher's."""
WARNING_SECONDS = 10.0
"""How long torch's warning is held back: a job that has not ended by then goes on."""
BLOCK = 1 << 16

_RULE = re.compile(rb"(-{20}.*|.*-{40})", re.DOTALL)
_FIRST_LINE = re.compile(
    rb"MPI_ABORT was invoked on rank "
    rb"|\S+ has exited due to process rank .* calling$"
    rb"|\S+ detected that one or more processes exited with non-zero status,"
    rb"|Primary job +terminated normally, but \d+ process(es)? returned$"
)
_OTHER_LINES = re.compile(
    rb"$"
    rb"|  Proc: |  Errorcode: |with errorcode "
    rb"|NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes\.$"
    rb"|You may or may not see output from other processes, depending on$"
    rb"|exactly when Open MPI kills them\.$"
    rb'|"abort"\. This may have caused other processes in the application to be$'
    rb"|terminated by signals sent by .* \(as reported here\)\.$"
    rb"|(thus causing )?the job to be terminated\. The first process to do so was:$"
    rb"|thus causing the job to be terminated\."
    rb"| {2,3}(Process name|Exit code): "
    rb"|a non-zero exit code\. Per user-direction, the job has been aborted\.$"
)
_ABORT = re.compile(rb"Abort\(.*\) on node .*application called MPI_Abort\(")
_COUNT = re.compile(rb".* has sent help message help-mpi-api\.txt / mpi-abort$")
_COUNT_HINT = b"to see all help / error messages"
_LABEL = rb"(?:\[\d+@[^\]]*\] )?"
_WARNING = re.compile(
    _LABEL + rb"(\[rank\d+\]:)?\[W.* TCPStore\.cpp:\d+\] \[c10d\] \w+ failed on SocketImpl"
)
_STACK = re.compile(_LABEL + rb"(Exception raised from |frame #\d+: |<omitting python frames>$|$)")
_REPORT_START = b"mpiddp: rank "
_REPORT = re.compile(_LABEL + _REPORT_START + rb"\d")
_EXPLANATION = re.compile(
    _LABEL + rb"mpiddp: (?!started|note: |.* was lost.*: it was killed by SIGKILL)"
)
"""Of the end of a job: a launcher kills ranks, too, if a script calls MPI_Abort."""
_STARTS = (b"-", b"[", b"\0", b"A")
_PASS, _RULED, _DROP, _COUNTED = range(4)
"""What the next line may be: any; the first of a paragraph; one of a paragraph that is left out;
the hint after a count of paragraphs."""


class MessageFilter:
    """Leaves out paragraphs about MPI_Abort and exit codes, line by line."""

    def __init__(self) -> None:
        self._state = _PASS
        self._rule = b""
        """The line above a paragraph, held back until the paragraph's first line is known."""
        self._is_after_text = False
        """Whether that rule stands behind the beginning of a rank's line."""
        self._warning = b""
        """torch's, held back since ``_warned``."""
        self._warned = 0.0
        self._is_in_warning = False
        self._is_reported = False
        """Whether a rank has said how the job ends."""
        self._aborts = b""
        """Lines about MPI_Abort, held back until the end."""
        self._is_explained = False
        """Whether they repeat what was said."""
        self._tail = b""
        """A line without an end."""
        self._is_begun = False
        """Whether the beginning of that line was let through already."""
        self._since = 0.0
        """Since when what precedes the end of that line is held back."""

    def add(self, data: bytes) -> bytes:
        """Return what is to be shown by now."""
        now = time.monotonic()
        if b"\n" in data or not self._tail:
            self._since = now
        *lines, self._tail = (self._tail + data).split(b"\n")
        shown = b"".join(self._take(line) for line in lines)
        if self._warning and not self._is_begun:
            shown += self._release_warning()
        if self._state == _PASS and self._tail and not self._may_be_a_launchers():
            shown += self._release_tail()
        if self._tail and now - self._since > PATIENCE_SECONDS:
            # A progress bar, for example, which goes on without an end.
            shown += self.release()
        return shown

    def release(self, *, at_end: bool = False) -> bytes:
        """Return what is held back: at the end, or when a line does not end."""
        warning, rule = self._release_warning(at_end=at_end), b""
        if self._state == _RULED:
            rule, self._state = self._rule + b"\n", _PASS
        shown = warning + rule + self._release_tail()
        aborts = b"" if self._is_explained or not at_end else self._aborts
        return shown + aborts

    def _release_warning(self, *, at_end: bool = False) -> bytes:
        if not at_end and time.monotonic() - self._warned <= WARNING_SECONDS:
            return b""
        warning = b"" if at_end and self._is_reported else self._warning
        self._warning, self._is_in_warning = b"", False
        return warning

    def _may_be_a_launchers(self) -> bool:
        """Whether the line without an end may be one that is not just let through."""
        starts = (*_STARTS, b"E", b"f", b"<") if self._is_in_warning else _STARTS
        if self._tail.endswith(b"-"):
            return True
        # A report is known by its beginning.
        is_start = _REPORT_START.startswith(self._tail)
        return not self._is_begun and (is_start or self._tail.startswith(starts))

    def _release_tail(self) -> bytes:
        # Open MPI ends its messages with a NUL byte.
        tail, self._tail = self._tail.lstrip(b"\0"), b""
        self._note_report(tail, self._is_begun)
        self._is_begun = self._is_begun or bool(tail)
        return tail

    def _note_report(self, line: bytes, is_begun: bool) -> None:
        self._is_reported |= not is_begun and bool(_REPORT.match(line))
        self._is_explained |= not is_begun and bool(_EXPLANATION.match(line))

    def _take(self, line: bytes) -> bytes:
        line = line.lstrip(b"\0")
        is_begun, self._is_begun = self._is_begun, False
        if self._state == _DROP:
            if line.startswith(b"-" * 20):
                self._state = _PASS
                return b""
            return b"" if _OTHER_LINES.match(line) else line + b"\n"
        before = b""
        if self._state == _RULED:
            if _FIRST_LINE.match(line):
                self._state, of_rank = _DROP, self._rule.partition(b"-" * 20)[0]
                return of_rank + b"\n" if of_rank or self._is_after_text else b""
            before = self._rule + b"\n"
        elif self._state == _COUNTED and _COUNT_HINT in line:
            self._state = _PASS
            return b""
        self._state = _PASS
        return before + self._pass(line, is_begun)

    def _hold_warning(self, line: bytes) -> bool:
        """Whether this line belongs to torch's warning; it is kept."""
        if _WARNING.match(line):
            self._warned = time.monotonic()
        elif not (self._is_in_warning and _STACK.match(line)):
            return False
        self._warning += line + b"\n"
        # A blank line ends it.
        self._is_in_warning = bool(re.sub(_LABEL, b"", line, count=1))
        return True

    def _pass(self, line: bytes, is_begun: bool) -> bytes:
        if not is_begun and self._hold_warning(line):
            return b""
        self._note_report(line, is_begun)
        if _RULE.fullmatch(line):
            self._rule, self._state, self._is_after_text = line, _RULED, is_begun
            return b""
        if not is_begun and _ABORT.match(line):
            self._aborts += line + b"\n"
            return b""
        if not is_begun and _COUNT.match(line):
            self._state = _COUNTED
            return b""
        return line + b"\n"


def copy_messages(
    stream: IO[bytes], process: subprocess.Popen[bytes], show: Callable[[bytes], object]
) -> None:
    """Show what a launcher writes, until it has ended or closed ``stream``."""
    messages = MessageFilter()
    while True:
        # Asked first: it writes its last words before it ends.
        has_ended = process.poll() is not None
        if not select.select([stream], [], [], PATIENCE_SECONDS)[0]:
            show(messages.release(at_end=has_ended))
            if has_ended:
                return  # What it has started may keep the stream open.
            continue
        piece = os.read(stream.fileno(), BLOCK)
        if not piece:
            break
        show(messages.add(piece))
    show(messages.release(at_end=True))
