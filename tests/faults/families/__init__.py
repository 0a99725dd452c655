"""The faults, by the names that the campaign gives them."""

from __future__ import annotations

from attempts import Family
from families import (
    cluster,
    cuts,
    damage,
    disk,
    kills,
    programs,
    saves,
    signals,
    stalls,
    strangers,
    worlds,
)

FAMILIES: dict[str, Family] = {
    "kill": kills.KILL,
    "save": saves.SAVE,
    "cut": cuts.CUT,
    "damage": damage.DAMAGE,
    "disk": disk.DISK,
    "signal": signals.SIGNAL,
    "requeue": cluster.REQUEUE,
    "still": stalls.STILL,
    "endless": stalls.ENDLESS,
    "node": cluster.NODE,
    "program": programs.PROGRAM,
    "world": worlds.WORLD,
    "stranger": strangers.STRANGER,
}
