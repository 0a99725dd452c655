"""The faults, by the names that the campaign gives them."""

from __future__ import annotations

from attempts import Family
from families import damage, kills

FAMILIES: dict[str, Family] = {
    "kill": kills.KILL,
    "damage": damage.DAMAGE,
}
