"""Reads a plan of any format that is known, by the ending of its name."""

from __future__ import annotations

from pathlib import Path

from mpiddp.errors import ConfigurationError
from mpiddp.files import read_whole
from mpiddp.schedules.plans.plan import Plan

XML, JSON = ".xml", ".json"
PLANS = (XML, JSON)


def read_plans(path: Path) -> list[Plan]:
    """The plan, once for each way in which its buffers may lie.

    Raises ConfigurationError for a file that is no plan, or has what is not known; ScheduleError
    for one that could never end.
    """
    if path.suffix not in PLANS:
        raise ConfigurationError(f"{path}: expected a name that ends in {' or '.join(PLANS)}")
    # Most runs have none, and do not wait for what these import.
    from mpiddp.schedules.plans import msccl_xml, mscclpp_json

    try:
        data = read_whole(path)
        return [*(msccl_xml.read_xml(data) if path.suffix == XML else mscclpp_json.read_json(data))]
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
