"""``python -m mpiddp bench COMMAND``: the benchmarks, ``python -m benchmarks`` of a checkout."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the command that the command line names."""
    # The benchmarks import each other as `benchmarks`: of this installation, not of where you are.
    folder = (Path(__file__).parent / "benchmarks").resolve()
    sys.path.insert(0, str(folder.parent))
    runpy.run_module(folder.name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
