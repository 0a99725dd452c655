"""The stages of a start-up: whose each is, and what is counted in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MPI, TORCH, OURS = "MPI", "torch", "mpiddp"
"""Whose a stage is."""

AGREEMENT, REST, END = "agreement", "rest", "end"
"""Marks beside the names of the Starter's methods: the ranks agree that none has failed; nothing of
these; start-up is over."""

MARK = "/mpiddp-start-up/"
"""How the name begins that rank 0 looks up in the file system to mark a moment in its trace."""


@dataclass(frozen=True)
class Stage:
    name: str
    owner: str
    marks: tuple[str, ...]
    """Methods of the Starter, or other marks."""
    advice: str
    """What could be changed there."""


COMPANION, IMPORT = "companion", "import torch"
IMPORTED = "join_import"
STAGES = (
    Stage("MPI_Init", MPI, ("start_mpi",), "a setting or a release of the MPI library"),
    Stage(
        "ranks and nodes", OURS, ("meet_ranks",),
        "rank 0's list of all ranks: gather one message a node, or drop what nobody reads",
    ),
    Stage(
        IMPORT, TORCH, ("begin_import", IMPORTED),
        "the file system that Python's packages are read from: a local copy on each node",
    ),
    Stage(
        COMPANION, OURS, ("begin_lifeline", "join_lifeline"),
        "every node's companion connects to rank 0's: connect them in a tree",
    ),
    Stage("devices", OURS, ("find_device", "bind_cores", "take_device"), "the ranks of one node"),
    Stage(
        "address", OURS, ("find_address",),
        "every node's leader tries each address of rank 0, with 64 KiB each way: let a few, spread "
        "over the nodes, try all, and the others the one that is chosen; or in a tree",
    ),
    Stage(
        "TCPStore", TORCH, ("open_store",),
        "every rank connects to rank 0's store: one connection a node, or stores in a tree",
    ),
    Stage(
        "process group", TORCH, ("open_group",),
        "Gloo connects every pair and every rank reads all addresses from rank 0's store: connect "
        "when a pair first talks (TORCH_GLOO_LAZY_INIT), or exchange the addresses over MPI",
    ),
    Stage(
        "first all-reduce", TORCH, ("try_group",),
        "the framework's algorithm for short messages",
    ),
    Stage(
        "agreements", OURS, (AGREEMENT,),
        "one agreement after several stages in place of one after each",
    ),
    Stage("summary", OURS, (REST,), "what each node reports: on rank 0 only what it prints"),
)  # fmt: skip
OF_MARKS: Mapping[str, Stage] = {mark: stage for stage in STAGES for mark in stage.marks}
BY_NAME: Mapping[str, Stage] = {stage.name: stage for stage in STAGES}

CONNECTIONS, MESSAGES, BYTES = "connections", "messages", "bytes"
SECONDS, PROCESSOR = "seconds", "processor seconds"
COUNTED = (CONNECTIONS, MESSAGES, BYTES)
TIMED = (SECONDS, PROCESSOR)
UNITS = {
    CONNECTIONS: CONNECTIONS,
    MESSAGES: MESSAGES,
    BYTES: "B",
    SECONDS: "s",
    PROCESSOR: "s",
}
