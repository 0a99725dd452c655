"""The real table of launchers, in the environment FAKE_PREFIX of FAKE_USER on 4 cores."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpiddp import __main__ as door
from mpiddp.process import cpus

sys.prefix = os.environ["FAKE_PREFIX"]
sys.executable = f"{sys.prefix}/bin/python"
os.geteuid = lambda: int(os.environ.get("FAKE_USER", "1000"))
cpus.count_cores = lambda: 4
door.main()
