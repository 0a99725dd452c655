"""The faults, by the names that the campaign gives them."""

from __future__ import annotations

from attempts import Family
from families import cancels, cluster, kills, programs, resumes, signals, storage, strangers

FAMILIES: dict[str, Family] = {
    "kill": kills.KILL,
    "save": kills.SAVE,
    "cut": resumes.CUT,
    "damage": storage.DAMAGE,
    "disk": storage.DISK,
    "signal": signals.SIGNAL,
    "requeue": cluster.REQUEUE,
    "still": programs.STILL,
    "endless": programs.ENDLESS,
    "node": cluster.NODE,
    "program": programs.PROGRAM,
    "world": resumes.WORLD,
    "stranger": strangers.STRANGER,
    "cancel": cancels.CANCEL,
}
