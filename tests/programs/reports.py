"""What each rank of a job reports: a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_report(folder: Path, session: Any, report: Any) -> None:
    """Called by a rank: leave what it found, as JSON."""
    (folder / f"{session.world.rank}.json").write_text(json.dumps(report))
