"""What all stages of an examination use: the ranks' findings gathered, a deadline, the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from mpiddp.doctor.examiner.doctor_options import FINDINGS, DoctorOptions
from mpiddp.doctor.examiner.findings import Finding, failed, merge
from mpiddp.doctor.examiner.findings_report import FindingsReport, open_report
from mpiddp.errors import MpiddpError
from mpiddp.launch.fabrics import find_fabrics, read_table
from mpiddp.launch.failure.deadline import PhaseDeadlines
from mpiddp.launch.failure.error_meaning import exit_code
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.launcher import find_launcher, is_first
from mpiddp.launch.mpi import mpi
from mpiddp.launch.phases import JobRanks, StartUp
from mpiddp.options.outputs import find_one

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class Stages:
    """The stages of an examination, each with a deadline; rank 0 reports their findings."""

    def __init__(self, settings: DoctorOptions, failure_handler: FailureHandler) -> None:
        self.failure_handler = failure_handler
        self.report: FindingsReport | None = None
        if is_first():
            self.report = open_report(find_one(settings.output, FINDINGS), find_launcher())
        self._began = time.monotonic()
        self._deadlines = PhaseDeadlines(settings.timeout, failure_handler.expire)

    def close(self) -> None:
        self._deadlines.close()

    @contextmanager
    def stage(self, phase: str) -> Iterator[None]:
        """A stage with its deadline; findings inside tell how long it took until them."""
        self._began = time.monotonic()
        with self._deadlines.phase(phase):
            yield

    def add(self, finding: Finding) -> None:
        if self.report is not None:
            seconds = round(time.monotonic() - self._began, 4)
            self.report.add(replace(finding, seconds=seconds))


class Examiner:
    """What examines a launch once MPI is up. Gathered values should be small."""

    def __init__(
        self,
        settings: DoctorOptions,
        start_up: StartUp,
        ranks: JobRanks,
        stages: Stages,
        before: Mapping[str, str],
    ) -> None:
        """``before``: the environment that start-up has found; it sets variables itself."""
        self.settings = settings
        self.start_up = start_up
        self.ranks = ranks
        self.world = ranks.world
        self.control = ranks.control
        self.leaders = ranks.leaders
        """The first ranks of all nodes; None for others, and without MPI."""
        self.leads_node = ranks.leads_node
        self.hostnames = ranks.hostnames
        """Of the nodes, by their rank; on rank 0."""
        self.add, self.stage = stages.add, stages.stage
        self.before = before
        defaults = start_up.site_defaults
        self.variables = {**before, **(defaults.everywhere if defaults is not None else {})}
        """``before``, and what ``--site-defaults`` has set."""
        self.table = read_table(defaults.file if defaults is not None else None)
        self.fabrics = find_fabrics(self.table, self.variables)

    def attempt(
        self,
        check: str,
        work: Callable[..., T],
        *found: Any,
        expected: type[Exception] = MpiddpError,
        advice: str = "",
    ) -> T | None:
        """Do a phase of start-up; None if it failed on a rank, which is a finding. Collective.

        ``expected``: the errors that are findings. Any other ends the job: it is the doctor's own
        failure.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work(self.start_up, *found)
        except expected as caught:
            error = caught
        except BaseException as caught:  # It ends the job.
            self.start_up.failure_handler.settle(caught)
        self.start_up.failure_handler.settle(None)
        if not self.control.any(error is not None):
            return result
        mine = _describe(error) if error is not None else None
        for rank, row in enumerate(self.gather(mine) or ()):
            if row is not None:
                code, text, is_ours = row
                text = text if is_ours else f"{self.describe_rank(rank)}: {text}"
                self.add(failed(check, text, advice, code))
                break
        return None

    # Findings

    def add_merged(self, rows: Sequence[Sequence[Finding]]) -> None:
        """Merge the nodes' findings, check by check; a row holds those of one node."""
        for findings in zip(*rows, strict=True):
            self.add(merge(self.hostnames, findings))

    def gather(self, value: T) -> list[T] | None:
        """All ranks' values on rank 0, None on the others. Collective."""
        return _gather(self.ranks.comm, value)

    def gather_on_node(self, value: T) -> list[T] | None:
        """The values of a node's ranks on its first rank, None on the others. Collective."""
        return [value] if self.ranks.node is None else self.ranks.node.gather(value)

    def gather_nodes(self, value: T) -> list[T] | None:
        """The values of all nodes' first ranks on rank 0, None on the others. Collective."""
        return _gather(self.leaders, value) if self.leads_node else None

    # Rank 0 alone knows what follows.

    def host_of(self, rank: int) -> str:
        roster = self.ranks.roster
        return self.hostnames[roster.nodes[rank] if roster is not None else 0]

    def describe_rank(self, rank: int) -> str:
        """``rank 3 on node002``."""
        return f"rank {rank} on {self.host_of(rank)}"


def _gather(communicator: MPI.Intracomm | None, value: T) -> list[T] | None:
    # Ranks that wait sleep: the cores are importing torch.
    if communicator is None:
        return [value]
    return mpi.SleepingCommunicator(communicator).gather(value)


def _describe(error: Exception) -> tuple[int, str, bool]:
    """Exit code, one line, and whether the error is ours, which may hold a table."""
    if isinstance(error, MpiddpError):
        return exit_code(error), str(error), True
    lines = str(error).splitlines() or [""]
    return exit_code(error), f"{type(error).__name__}: {lines[0]}", False
