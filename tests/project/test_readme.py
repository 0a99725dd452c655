"""README is true: its commands run, they print what it says, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import copies
import documents
import launchers
import slurm

README = documents.README
TESTED_ELSEWHERE = re.compile(r"python -m benchmarks (startup|allreduce|training-step|stragglers) ")
"""Commands that the benchmarks' own tests run by default, with more options."""
LANGUAGES = {"bash", "python", "text", "toml", "mermaid", "json", "diff"}
RUN = ("bash", "python")
DEADLINE = 150
UNTIL_JOBS_END = """
while jobs=$(squeue --noheader) || exit; [ -n "$jobs" ]; do sleep 0.1; done
jobs=$(scontrol --oneliner show job)
! grep --invert-match JobState=COMPLETED <<<"$jobs"
"""
"""Appended to blocks that submit jobs; sbatch's own --wait looks after 2, 10 and 42 s."""
LEFT_OUT = {".venv", ".mpich", ".openmpi", ".git", "runs"}
LEFT_OUT |= {".mypy_cache", ".pytest_cache", ".ruff_cache"}


def read_blocks() -> list[documents.Block]:
    return documents.find_blocks(README.read_text(encoding="utf-8")) if README.exists() else []


BLOCKS = read_blocks()
RUNNABLE = [block for block in BLOCKS if block.language in RUN and block.excuse is None]


@dataclass
class Reader:
    """Somebody who follows README from top to bottom in a copy of the checkout."""

    root: Path
    state: Path
    """Of the cluster that README brings up, which is not the user's own."""

    def slurm(self) -> dict[str, str]:
        """What README's cluster exports, where it is up."""
        cluster = slurm.Cluster(self.state)
        return cluster.environment() if self.state.exists() else {}

    def environment(self) -> dict[str, str]:
        launcher = launchers.table()["openmpi"]
        path = [launcher.mpirun.parent, Path(sys.executable).parent, os.environ["PATH"]]
        root_flags = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return launchers.clean_environment(
            {
                **launcher.environment,
                **(root_flags if os.geteuid() == 0 else {}),
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "PATH": os.pathsep.join(map(str, path)),
                "MPI4PY_LIBMPI": str(launcher.libmpi),
                "PYTHONPATH": str(self.root),
                # Nothing is installed.
                "MPIDDP_PYTHON": sys.executable,
                "MPIDDP_CLUSTER_DIR": str(self.state),
                **self.slurm(),
            }
        )

    def run(self, block: documents.Block) -> str:
        """What the block prints; AssertionError if it fails."""
        command = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
        waiting = UNTIL_JOBS_END if re.search(r"^sbatch ", block.text, re.MULTILINE) else ""
        done = subprocess.run(
            [*command[block.language], block.text + waiting],
            cwd=self.root,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, f"{block.text}exit code {done.returncode}\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Iterator[Reader]:
    root = tmp_path_factory.mktemp("readme") / "mpiddp"
    copies.copy(
        launchers.ROOT, root, ignore=lambda _, names: LEFT_OUT.intersection(names), symlinks=True
    )
    for prefix in (launchers.MPICH_PREFIX, launchers.OPEN_MPI_PREFIX):
        if prefix.exists():
            (root / prefix.name).symlink_to(prefix)
    # Not below root: its path must be short, and other users of the cluster look into it.
    state = Path(tempfile.mkdtemp(prefix="mpiddp-", dir="/tmp"))
    state.chmod(0o755)
    yield Reader(root, state / "cluster")
    slurm.Cluster(state / "cluster").control("down")
    shutil.rmtree(state, ignore_errors=True)


def test_there_is_a_readme_with_commands():
    assert RUNNABLE, "README.md has no block that is run"


def test_every_block_says_what_it_is():
    unknown = [f"README.md:{block.line}" for block in BLOCKS if block.language not in LANGUAGES]
    assert not unknown, f"a fence names one of {sorted(LANGUAGES)}: {unknown}"


def uses_slurm(block: documents.Block) -> bool:
    return (
        re.search(r"^(jobs/cluster/|srun |sbatch |salloc |squeue )", block.text, re.M) is not None
    )


def as_parameter(block: documents.Block):
    marks = [pytest.mark.slurm if uses_slurm(block) else pytest.mark.mpi]
    if TESTED_ELSEWHERE.match(block.text):
        marks.append(pytest.mark.long)
    name = re.sub(r"[^\w.]+", "-", block.text.splitlines()[0])
    return pytest.param(block, marks=marks, id=name[:40].strip("-"))


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize("block", [as_parameter(block) for block in RUNNABLE])
def test_a_block_runs_and_prints_what_follows_it(block, reader):
    obstacle = slurm.find_obstacle() if uses_slurm(block) else None
    if obstacle is not None:
        pytest.skip(obstacle)
    output = reader.run(block)
    for excerpt in BLOCKS[BLOCKS.index(block) + 1 :][:1]:
        if excerpt.language == "text" and excerpt.follows and excerpt.excuse is None:
            missing = documents.missing_lines(excerpt.text, output)
            assert not missing, f"{missing} not in\n{output}"


def test_blocks_that_are_left_out_say_why(record_property):
    excused = [block for block in BLOCKS if block.excuse is not None]
    record_property(
        "note", f"README.md: {len(RUNNABLE)} blocks are run, {len(excused)} are left out"
    )
    for block in excused:
        record_property("note", f"    line {block.line}: {block.excuse}")
        assert block.excuse, f"README.md:{block.line}: no-test needs a reason"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(name):
    path = launchers.ROOT / name
    text = path.read_text(encoding="utf-8")
    lost = [target for target in documents.find_links(text) if not leads_somewhere(path, target)]
    assert not lost


def leads_somewhere(path: Path, target: str) -> bool:
    """Whether a relative link, with its anchor, does; links to other places are not followed."""
    if "://" in target or target.startswith("mailto:"):
        return True
    file, _, anchor = target.partition("#")
    other = (path.parent / file) if file else path
    if not other.exists():
        return False
    return not anchor or anchor in documents.find_anchors(other.read_text(encoding="utf-8"))


@pytest.mark.slurm
def test_a_job_that_fails_fails_its_block(reader):
    text = 'jobs/cluster/up --nodes 1\neval "$(jobs/cluster/env)"\nsbatch --wrap=exit\\ {}\n'
    blocks = [documents.Block(1, "bash", text.format(code), None, False) for code in (0, 3)]
    try:
        reader.run(blocks[0])
        with pytest.raises(AssertionError, match="JobState=FAILED"):
            reader.run(blocks[1])
    finally:
        slurm.Cluster(reader.state).must("down")


SAMPLE = """\
# Title

```bash
echo 12 epochs
```

```text
Epoch 1 - Avg Loss: 0.25, …
…
```

Words with a [link](LICENSE "title") and `[no](link)`.

<!-- no-test: needs a cluster -->

```bash
sbatch job
# not a heading
```

~~~python
print("```")
~~~

## A *second* heading: `code`, 2 words
![picture](docs/a%20b.svg) <img src='c.svg'>
[ref]: other.md#part
"""


def test_blocks_are_found():
    blocks = documents.find_blocks(SAMPLE)
    assert [(item.line, item.language, item.excuse, item.follows) for item in blocks] == [
        (3, "bash", None, False),
        (7, "text", None, True),
        (16, "bash", "needs a cluster", False),
        (21, "python", None, True),
    ]
    assert blocks[0].text == "echo 12 epochs\n"
    assert blocks[3].text == 'print("```")\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- no-test: why -->\nwords\n", "before no block"),
        ("```bash\necho\n", "has no end"),
    ],
)
def test_a_text_that_cannot_be_meant_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        documents.find_blocks(text)


def test_links_and_anchors_are_found():
    assert documents.find_links(SAMPLE) == ["LICENSE", "docs/a b.svg", "other.md#part", "c.svg"]
    expected = {"title", "a-second-heading-code-2-words"}
    assert documents.find_anchors(SAMPLE) == expected
    assert documents.find_anchors("# Twice\n## Twice\n") == {"twice", "twice-1"}


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# One two\n")
    assert leads_somewhere(path, "#one-two")
    assert leads_somewhere(path, "README.md#one-two")
    assert not leads_somewhere(path, "#three")
    assert not leads_somewhere(path, "LICENSE")


@pytest.mark.parametrize(
    ("expected", "printed", "found"),
    [
        ("Epoch 1 - Avg Loss: 0.234567", "Epoch 12 - Avg Loss: 3.1, Accuracy: 4.2%", True),
        ("Epoch 1 - Avg Loss: 0.234567", "Epoch one - Avg Loss: 3.1", False),
        ("Master node: …, port 1", "Master node: vm (10.0.0.1), port 4711", True),
        ("Master node: …, port 1", "Master node: vm (10.0.0.1)", False),
        ("a   b", "a b", True),
        ("a.b", "axb", False),
    ],
)
def test_excerpts_are_compared(expected, printed, found):
    assert (documents.missing_lines(expected + "\n…\n\n", f"other\n{printed}\n") == []) is found


@pytest.mark.parametrize(
    ("language", "text"), [("bash", "false | true\n"), ("python", "raise ValueError\n")]
)
def test_a_block_that_fails_fails_its_test(language, text, tmp_path):
    with pytest.raises(AssertionError, match="exit code 1"):
        Reader(tmp_path, tmp_path / "none").run(documents.Block(1, language, text, None, False))
