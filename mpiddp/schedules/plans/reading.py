"""Reads a plan of any format that is known, by the ending of its name."""

from __future__ import annotations

from pathlib import Path

from mpiddp.errors import ConfigurationError
from mpiddp.schedules.plans.msccl_xml import read_xml
from mpiddp.schedules.plans.mscclpp_json import read_json
from mpiddp.schedules.plans.plan import Plan

READERS = {".xml": read_xml, ".json": read_json}
PLANS = tuple(READERS)


def read_plans(path: Path) -> list[Plan]:
    """The plan, once for each way in which its buffers may lie.

    Raises ConfigurationError for a file that is no plan, or has what is not known; ScheduleError
    for one that could never end.
    """
    if path.suffix not in READERS:
        raise ConfigurationError(f"{path}: expected a name that ends in {' or '.join(PLANS)}")
    try:
        return READERS[path.suffix](path)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
