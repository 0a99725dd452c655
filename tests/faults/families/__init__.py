"""The faults, by the names that the campaign gives them."""

from __future__ import annotations

from attempts import Family
from families import cuts, damage, disk, kills, programs, saves, signals, stalls, worlds

FAMILIES: dict[str, Family] = {
    "kill": kills.KILL,
    "save": saves.SAVE,
    "cut": cuts.CUT,
    "damage": damage.DAMAGE,
    "disk": disk.DISK,
    "signal": signals.SIGNAL,
    "still": stalls.STILL,
    "endless": stalls.ENDLESS,
    "program": programs.PROGRAM,
    "world": worlds.WORLD,
}
