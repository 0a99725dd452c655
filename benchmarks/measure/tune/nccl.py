"""A tuning table as the file of NCCL's example tuner plugin.

Read from its source (NVIDIA/nccl, plugins/tuner/example: plugin.c, README.md): lines of
FIELDS, of which the first that fits counts; both sizes are included, -1 leaves a choice to NCCL or
fits everything, and lines that begin with # are left out. It takes a name that it does not know for
``allreduce``, ``ring`` or ``simple``, so only names that it knows are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.judge.choosing import RULE, SizeChoice, Way, list_ranges
from mpiddp.collectives import AUTO
from mpiddp.collectives.tuning import Range, Section, describe_layout
from mpiddp.errors import ConfigurationError
from mpiddp.files import write_whole

FIELDS = (
    "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,"
    "nNodes,nRanks,numPipeOps,regBuff"
)
ALGORITHMS = {
    "all-reduce": {"ring": "ring", "double-tree": "tree"},
    "reduce-scatter": {"ring": "ring", "pat": "pat"},
    "all-gather": {"ring": "ring", "pat": "pat"},
    "broadcast": {"naive-ring": "ring"},
    "reduce": {"naive-ring": "ring"},
}
"""NCCL's names of those algorithms that NCCL has, by collective."""
SHORT = 32 << 10
"""Bytes up to which latency decides, as for `mpiddp.collectives.planner`."""
HEADING = f"""\
# {FIELDS}
# For NCCL's example tuner plugin: NCCL_TUNER_CONFIG_FILE names this file.
# Measured with mpiddp's algorithms, not NCCL's. Protocols were not measured: ll up to
# {SHORT} bytes, where latency decides, simple beyond.
"""


def write_csv(path: Path, verdicts: Mapping[Section, Sequence[SizeChoice]]) -> list[str]:
    """Write the file; returns what NCCL does not have, in words.

    Its lines know no type of elements, so of several the first one is written. Raises
    ConfigurationError if the file cannot be written.
    """
    lines, left_out = list[str](), list[str]()
    written: dict[tuple[object, ...], str] = {}
    for section, found in verdicts.items():
        if written.setdefault((section.collective, section.nodes), section.type) != section.type:
            left_out.append(f"{section.collective} of {section.type}: a line knows no type")
            continue
        for each in list_ranges([_name_choice(verdict) for verdict in found]):
            name = ALGORITHMS[section.collective].get(each.algorithm)
            if name is not None:
                lines += _format(section, each, name)
            else:
                left_out.append(
                    f"{section.collective} on {describe_layout(section.nodes)}, {each.least} to "
                    f"{each.most} B: {each.algorithm}"
                )
    try:
        write_whole(path, HEADING + "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
    return left_out


def _name_choice(verdict: SizeChoice) -> SizeChoice:
    """With the algorithm that runs in place of ``auto``; without parameters and transport."""
    text = verdict.rule if verdict.chosen == RULE else str(verdict.chosen)
    name = text.partition(" over ")[0].partition(":")[0]
    return replace(verdict, chosen=Way(name, AUTO))


def _format(section: Section, found: Range, name: str) -> Iterable[str]:
    collective = section.collective.replace("-", "")
    nodes, ranks = len(section.nodes), sum(section.nodes)
    parts = {
        "ll": (found.least, min(found.most, SHORT)),
        "simple": (max(found.least, SHORT + 1), found.most),
    }
    for protocol, (least, most) in parts.items():
        if least <= most:
            yield f"{collective},{least},{most},{name},{protocol},-1,{nodes},{ranks},-1,-1"
