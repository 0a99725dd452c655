"""What all stages of an examination use: the ranks' findings gathered, a deadline, the report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from mpiddp.doctor.examiner.doctor_options import FINDINGS, DoctorOptions
from mpiddp.doctor.examiner.findings import Finding, failed, merge
from mpiddp.doctor.examiner.findings_report import Report, open_report
from mpiddp.errors import MpiddpError
from mpiddp.launch.failure.deadline import PhaseDeadlines
from mpiddp.launch.failure.error_report import exit_code
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.launcher import find_launcher, is_first
from mpiddp.launch.mpi import mpi
from mpiddp.launch.network.infiniband import find_infiniband, find_libfabric
from mpiddp.launch.startup import Starter
from mpiddp.options.outputs import find_one

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class Examiner:
    """Every rank has one; rank 0's holds the report. Gathered values should be small."""

    def __init__(self, settings: DoctorOptions, failure_handler: FailureHandler) -> None:
        self.settings = settings
        self.failure_handler = failure_handler
        self.starter = Starter(settings, failure_handler, make_group=True)
        self.report: Report | None = None
        if is_first():
            self.report = open_report(find_one(settings.output, FINDINGS), find_launcher())
        self.before = dict(os.environ)
        """What start-up found; it sets variables itself."""
        self.infiniband = find_infiniband()
        self.libfabric = find_libfabric()
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

    def attempt(
        self,
        work: Callable[[], object],
        check: str,
        expected: type[Exception] = MpiddpError,
        advice: str = "",
    ) -> bool:
        """Do a stage of start-up; an expected error is a finding. Whether none failed. Collective.

        What is not expected ends the job: it is the doctor's own failure.
        """
        error: Exception | None = None
        unexpected: BaseException | None = None
        try:
            work()
        except expected as caught:
            error = caught
        except BaseException as caught:  # `settle` ends the job with it.
            unexpected = caught
        self.failure_handler.settle(unexpected)
        if not self.starter.control.any(error is not None):
            return True
        mine = _describe(error) if error is not None else None
        for rank, row in enumerate(self.gather(mine) or ()):
            if row is not None:
                code, text, is_ours = row
                text = text if is_ours else f"{self.describe_rank(rank)}: {text}"
                self.add(failed(check, text, advice, code))
                break
        return False

    # Findings

    def add(self, finding: Finding) -> None:
        if self.report is not None:
            seconds = round(time.monotonic() - self._began, 4)
            self.report.add(replace(finding, seconds=seconds))

    def add_merged(self, rows: Sequence[Sequence[Finding]]) -> None:
        """Merge the nodes' findings, check by check; a row holds those of one node."""
        for findings in zip(*rows, strict=True):
            self.add(merge(self.hostnames(), findings))

    def gather(self, value: T) -> list[T] | None:
        """All ranks' values on rank 0, None on the others. Collective."""
        return _gather(self.starter.comm, value)

    def gather_on_node(self, value: T) -> list[T] | None:
        """The values of a node's ranks on its first rank, None on the others. Collective."""
        neighbourhood = self.starter.neighbourhood
        return _gather(neighbourhood.node if neighbourhood is not None else None, value)

    def gather_nodes(self, value: T) -> list[T] | None:
        """The values of all nodes' first ranks on rank 0, None on the others. Collective."""
        return _gather(self.leaders, value) if self.leads_node else None

    @property
    def leaders(self) -> MPI.Intracomm | None:
        """The first ranks of all nodes; None for others, and without MPI."""
        neighbourhood = self.starter.neighbourhood
        return neighbourhood.leaders if neighbourhood is not None else None

    @property
    def leads_node(self) -> bool:
        return self.starter.neighbourhood is None or self.leaders is not None

    # Rank 0 alone knows what follows.

    def hostnames(self) -> tuple[str, ...]:
        """Of the nodes, by their rank."""
        roster = self.starter.peers.roster
        return roster.hostnames if roster is not None else (self.starter.control.world.hostname,)

    def host_of(self, rank: int) -> str:
        roster = self.starter.peers.roster
        return self.hostnames()[roster.nodes[rank] if roster is not None else 0]

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
