"""The faults, by the names that the campaign gives them."""

from __future__ import annotations

from attempts import Family
from families import cancels, cluster, kills, signals, stops, storage

FAMILIES: dict[str, Family] = {
    "kill": kills.KILL,
    "save": kills.SAVE,
    "disk": storage.DISK,
    "signal": signals.SIGNAL,
    "requeue": cluster.REQUEUE,
    "still": stops.STILL,
    "endless": stops.ENDLESS,
    "node": cluster.NODE,
    "cancel": cancels.CANCEL,
}
