"""The design's floors: what may import, end the process, set variables and call MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

import architecture
import launchers


def test_the_source_keeps_the_rules():
    modules = architecture.read_modules(launchers.ROOT)
    violations = architecture.find_violations(modules)
    assert not violations, "\n".join(map(str, violations))
    # They were read.
    assert {"mpiddp", "mpiddp.errors", "mpiddp.launch.failure.failure"} <= modules.keys()


def test_the_code_stays_within_its_budget():
    limits = architecture.MOST_LINES
    lines = {folder: architecture.count_lines(launchers.ROOT, folder) for folder in limits}
    assert {each: count for each, count in lines.items() if count > limits[each]} == {}


GOOD = {
    "mpiddp/__init__.py": "def init():\n    from mpiddp.launch.session import Session\n",
    "mpiddp/errors.py": "import sys\n",
    "mpiddp/environment.py": "import os\nos.environ['RANK']\n",
    "mpiddp/train.py": "from mpiddp.training import trainer\n",
    "mpiddp/launch/__init__.py": "",
    "mpiddp/launch/session.py": (
        "import os\nfrom mpi4py import MPI\nfrom mpiddp import environment\n"
        "from .failure import failure\nos.environ[environment.RANK] = '0'\n"
    ),
    "mpiddp/launch/failure/failure.py": (
        "import os, sys\nfrom mpiddp.errors import MpiddpError\n"
        "def end(comm):\n    comm.Abort(1)\n    os._exit(1)\n    sys.exit(1)\n"
    ),
    "mpiddp/launch/network/rule.py": "import mpiddp.launch.failure.failure\n",
    "mpiddp/schedules/schedule.py": "import dataclasses\n",
    "mpiddp/sync/ddp_hook.py": "from mpiddp.schedules import schedule\n",
    "mpiddp/training/trainer.py": (
        "import os\nfrom typing import TYPE_CHECKING\nfrom mpiddp.sync.ddp_hook import hook\n"
        "from mpiddp.launch.session import Session\n"
        "if TYPE_CHECKING:\n    from mpi4py import MPI\n"
        "path = os.environ.get(name)\n"
    ),
}


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


VIOLATIONS = {
    "to a door": ("mpiddp/sync/server.py", "from mpiddp import init\n", "must not import mpiddp"),
    "sideways": ("mpiddp/schedules/proof.py", "from mpiddp.launch.session import Session\n",
        "must not import mpiddp.launch.session"),
    "for types": ("mpiddp/launch/mpi/world.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mpiddp.training.trainer\n",
        "must not import mpiddp.training.trainer"),
    "in a function": ("mpiddp/errors.py",
        "def look():\n    import mpiddp.environment\n    import mpiddp.launch.session\n",
        "must not import mpiddp.launch.session"),
    "by name": ("mpiddp/environment.py",
        "from importlib import import_module\nimport_module('mpiddp.sync.ddp_hook')\n",
        "must not import mpiddp.sync.ddp_hook"),
    "relative": ("mpiddp/launch/mpi/world.py", "from ...training import x\n", "must not import"),
    "relative package": ("mpiddp/launch/__init__.py", "from ..sync import ddp_hook\n",
        "must not import mpiddp.sync.ddp_hook"),
    "to benchmarks": ("mpiddp/train.py", "import benchmarks.measure.startup.worker\n",
        "must not import bench"),
    "no floor": ("mpiddp/utils.py", "", "no floor"),
    "circle": ("mpiddp/launch/failure/failure.py", "def f():\n    import mpiddp.launch.session\n",
        "a circle of imports"),
    "circle of folders": ("mpiddp/launch/failure/__init__.py",
        "import mpiddp.launch.network.rule\n",
        "a circle of imports: mpiddp.launch.failure > mpiddp.launch.network >"),
    "everything is caught": ("mpiddp/launch/session.py",
        "try:\n    f()\nexcept Exception:\n    pass\n", "does not say why"),
    "attributes": ("mpiddp/train.py",
        "def f(peers):\n    peers.world = 1\n    return peers._world_of\n",
        "train:2: assigns peers.world from outside", "train:3: looks into peers._world_of"),
    "exits": ("benchmarks/run.py",
        ("import sys as s\nfrom os import _exit as e\ns.exit(0)\ne(0)\nworld().Abort(3)\n"
        "raise SystemExit(2)\n"),
        "run:3: calls sys.exit", "run:4: calls os._exit", "run:5: calls Abort",
        "run:6: raises SystemExit"),
    "environment": ("benchmarks/run.py",
        ("import os\nfrom os import environ\ndel environ[name]\nos.environ |= {}\n"
        "os.environ.update(A=1)\nos.putenv('A', '1')\n"),
        *(f"run:{line}: sets an environment variable" for line in (3, 4, 5, 6))),
    "names of variables": ("mpiddp/train.py",
        "import os\nfrom os import getenv\nos.environ['A']\ngetenv('A')\n",
        "train:3: names the variable", "train:4: names the variable"),
    "pickles": ("mpiddp/train.py",
        ("import numpy as np, torch as t, torch.distributed as dist\n"
        "from pickle import loads as l\nl(data)\ndist.broadcast_object_list(box)\n"
        "np.load(path, allow_pickle=True)\nt.load(path, weights_only=False)\n"),
        "train:3: unpickles: pickle.loads",
        "train:4: unpickles: torch.distributed.broadcast_object_list",
        "train:5: numpy.load with pickles", "train:6: torch.load without weights_only=True"),
    "prints": ("benchmarks/run.py", "import sys\nprint(1)\nsys.stderr.write('')\n",
        "run:2: calls print", "run:3: calls sys.stderr.write"),
    "mpi4py, late": ("mpiddp/sync/ddp_hook.py",
        "def f():\n    import mpi4py.MPI\nif not TYPE_CHECKING:\n    import mpi4py.MPI\n",
        "ddp_hook:2: imports mpi4py", "ddp_hook:4: imports mpi4py"),
    "short": ("mpiddp/sync/ddp_hook.py", "HOOK = 1\n", "it belongs to mpiddp.training.trainer"),
    "class twice": ("mpiddp/train.py", "class Session: ...\n", "has a class Session, too"),
    "empty name": ("mpiddp/launch/common/__init__.py", "", "does not say what it holds"),
    "long": ("mpiddp/train.py", "def f():\n" + "    pass\n" * 60, "f has 61 lines"),
}  # fmt: skip


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_broken_rule_is_found(case, tmp_path):
    name, text, *expected = VIOLATIONS[case]
    world = "from mpiddp.launch import Session\nclass Session: ...\n"
    extra = {"mpiddp/launch/mpi/world.py": world}
    write_tree(tmp_path, {**GOOD, **extra, name: text})
    found = architecture.find_violations(architecture.read_modules(tmp_path))
    module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    told = "\n".join(str(each) for each in found if module in str(each))
    assert [each for each in expected if each not in told] == [], found
