"""What can go wrong, and the exit code that each kind of failure ends the job with.

    MpiddpError                 1   an error in your code, or in mpiddp
    ├── ConfigurationError      2   bad arguments or configuration
    │   └── ContentError        2   a file is not of the form that its reader expects
    ├── LaunchError             3   the launch is wrong: wrong PMI, no MPI, GPUs shared
    │   └── AloneError          3   no rank would find the others
    ├── UnreachableError        4   ranks could not reach each other in time
    ├── CheckpointError         5   no usable checkpoint where one was demanded
    ├── StorageError            1   a file system could not be read: another attempt may succeed
    │   └── UnwritableError     1   a file system does not take a file: it is full, for example
    ├── PeerLostError           6   a rank or peer was lost or stalled
    │   └── PeerFailedError     6   another rank has failed, so this one gives up
    ├── ScheduleError           1   a collective algorithm does not do what it promises
    ├── PreemptedError         75   preempted with a checkpoint written
    ├── StoppedError      128 + n   signal n asked the process to end
    └── RankFailedError         1   a function failed on ranks that this process calls

``128 + n`` is also the status of a process that signal n killed.

Every message says which rank on which host (the failure handler adds them), what was expected,
what was found, and what to do.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "LaunchError",
    "MpiddpError",
    "PeerLostError",
    "RankFailedError",
    "RemoteError",
    "ScheduleError",
    "UnreachableError",
]

SUCCESS = 0
FAILURE = 1
NO_CHECKPOINT = 5
PREEMPTED = 75
INTERRUPTED = 128 + signal.SIGINT

MEANINGS = {
    SUCCESS: "done",
    FAILURE: "an error in your code, or in mpiddp",
    2: "bad arguments or configuration",
    3: "the launch is wrong: wrong PMI, no MPI, GPUs shared",
    4: "ranks could not reach each other in time",
    NO_CHECKPOINT: "no usable checkpoint where one was demanded",
    6: "a rank or peer was lost or stalled",
    PREEMPTED: "preempted with a checkpoint written",
}
"""The exit codes that do not depend on a signal."""


OWN, PEER, REPEATED = "own", "peer", "repeated"
"""The origin of a rank's error: its own work; perhaps the loss of another rank; an error that
another rank reports itself."""


class MpiddpError(Exception):
    """The root of mpiddp's own errors; printed as one line, without a traceback.

        try:
            mpiddp.all_reduce(tensor, transport="shared-memory")
        except mpiddp.MpiddpError as error:
            print(error)

    ``exit_code`` is what the job ends with if nobody catches it.
    """

    exit_code: int = FAILURE


class ConfigurationError(MpiddpError):
    """An argument, a configuration file or an input that cannot be used.

        try:
            mpiddp.all_reduce(tensor, algorithm)
        except mpiddp.errors.ConfigurationError:
            mpiddp.all_reduce(tensor, "auto")

    The message says what was expected, and what was found.
    """

    exit_code = 2


class ContentError(ConfigurationError, ValueError):
    """A file or message is not of the form that its reader declares.

    ``__post_init__`` of a declared type raises it, too: `mpiddp.files` adds the field's place.
    """


class DifferentCallError(ConfigurationError):
    """Not all ranks make the same call."""


class LaunchError(MpiddpError):
    """The processes were started in a way that cannot work.

    `mpiddp.init` raises it in an interactive Python; elsewhere it ends the job.

        try:
            session = mpiddp.init()
        except mpiddp.errors.LaunchError as error:
            print("start the ranks with mpirun or srun:", error)
    """

    exit_code = 3


class AloneError(LaunchError):
    """Library and launcher do not fit, so that no process would find the others.

    All processes of the launch find this alike, and none of them can ask another.
    """


class UnreachableError(MpiddpError):
    """Ranks could not reach each other before the deadline.

    `mpiddp.init` raises it in an interactive Python; elsewhere it ends the job.

        try:
            session = mpiddp.init(timeout=60)
        except mpiddp.errors.UnreachableError as error:
            print("look at the network with mpiddp.doctor:", error)
    """

    exit_code = 4


class CheckpointError(MpiddpError):
    """There are checkpoints, but none that can be used.

        try:
            state = checkpointer.restore()
        except mpiddp.errors.CheckpointError as error:
            print("copy one back from your archive:", error)

    The message lists what is wrong with each of them.
    """

    exit_code = 5


class StorageError(MpiddpError):
    """A file system could not be read or written for a while; what it holds may be whole.

    Other than after a CheckpointError, another attempt may succeed.
    """


class UnwritableError(StorageError, OSError):
    """A file system does not take what is written to it: it is full, for example.

    As in every OSError, ``errno`` and ``strerror`` say why; ``filename`` is the file, if it is one.
    """

    def __str__(self) -> str:
        named = f"{self.filename} cannot be written: " if self.filename else ""
        return f"{named}{self.strerror}"


class PeerLostError(MpiddpError):
    """A rank that took part is gone, or stopped making progress.

        try:
            mpiddp.all_reduce(gradients)
        except mpiddp.errors.PeerLostError:
            torch.save(model.state_dict(), f"rank{session.world.rank}.pt")
            raise

    The message names the rank, and the step in which it was missed.
    """

    exit_code = 6


class PeerFailedError(PeerLostError):
    """A rank that this one waited for has failed, and says itself why."""


class ScheduleError(MpiddpError):
    """A schedule that does not keep its promise: a mistake in the algorithm that made it.

        try:
            mpiddp.all_reduce(tensor, "my-own")
        except mpiddp.errors.ScheduleError as error:
            print("my-own is wrong:", error)

    Every schedule is proved before it runs for the first time; the message says what is wrong.
    """


class PreemptedError(MpiddpError):
    """The job was preempted: all ranks have stopped after one step, and written a checkpoint."""

    exit_code = PREEMPTED


class StoppedError(MpiddpError):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number


class RankFailedError(MpiddpError, ExceptionGroup[Exception]):
    """A function failed on ranks that this process calls (`mpiddp.ranks`).

        try:
            losses = ranks.run(train)
        except mpiddp.errors.RankFailedError as error:
            print(error.by_rank[0])

    Its exceptions are the ranks' own, each with a note that names the ranks and hosts on which it
    was raised; those with equal tracebacks are listed once. A lost rank is a PeerLostError.

    Attributes:
        by_rank: the exception of each rank that failed.
    """

    by_rank: Mapping[int, Exception]

    def __new__(
        cls,
        message: str,
        exceptions: Sequence[Exception],
        by_rank: Mapping[int, Exception] = MappingProxyType({}),
    ) -> Self:
        group = super().__new__(cls, message, exceptions)
        group.by_rank = dict(by_rank)
        return group

    # Python's stub is generic over the exceptions; a group of this class has one kind.
    def derive(self, exceptions: Sequence[Exception]) -> RankFailedError:  # type: ignore[override]
        """The group that ``except*`` makes of some of the exceptions."""
        kept = {*map(id, exceptions)}
        by_rank = {rank: each for rank, each in self.by_rank.items() if id(each) in kept}
        return RankFailedError(self.message, exceptions, by_rank)


class RemoteError(MpiddpError):
    """Stands for an exception of a rank that cannot be sent as it is.

        try:
            ranks.run(train)
        except* mpiddp.errors.RemoteError as errors:
            print(errors)

    Its message has the class and the message of the other one.
    """
