"""README and docs/ are true: their commands run and print what the text says, and what they name of
the code is there."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import copies
import documents
import examples
import launchers
import mpiddp.schedules.algorithms  # noqa: F401 - importing it registers them
import slurm
from benchmarks.__main__ import COMMANDS as BENCHMARKS
from mpiddp.launch.script.command_line import FRONT, RANKS
from mpiddp.schedules import registry
from mpiddp.training.options.config import Configuration
from mpiddp.training.options.groups.registry import DATASETS, MODELS

BY_DEFAULT = "README"
"""The document whose blocks are run by default. Those of the chapters take five minutes, and
what their commands do is tested by the tests of each folder; they are run with ``--all``."""
LANGUAGES = {"bash", "python", "text", "toml", "json", "diff", "{eval-rst}"}
RUN = ("bash", "python")
DEADLINE = 500
UNTIL_JOBS_END = """
while jobs=$(squeue --noheader) || exit; [ -n "$jobs" ]; do sleep 0.1; done
jobs=$(scontrol --oneliner show job)
! grep --invert-match JobState=COMPLETED <<<"$jobs"
"""
"""Appended to blocks that submit jobs; sbatch's own --wait looks after 2, 10 and 42 s."""
LEFT_OUT = {".venv", ".mpich", ".impi", ".openmpi", ".git", "runs"}
LEFT_OUT |= {".mypy_cache", ".pytest_cache", ".ruff_cache"}


LONGEST_LINE = 110
"""Characters of a line of text; blocks, and what WIDE matches, are as wide as they must be."""
WIDE = re.compile(r"\||!\[")
"""A row of a table, or a picture."""
README_LINES = 150

BLOCKS = {path: documents.read_blocks(path) for path in documents.DOCUMENTS}


def is_run(block: documents.Block) -> bool:
    return block.language in RUN and block.excuse is None


@dataclass
class Reader:
    """Somebody who follows a document from top to bottom in a copy of the checkout."""

    root: Path
    state: Path
    """Of the cluster that the document brings up, which is not the user's own."""

    def slurm(self) -> dict[str, str]:
        """What the document's cluster exports, where it is up."""
        cluster = slurm.Cluster(self.state)
        return cluster.environment() if self.state.exists() else {}

    def environment(self) -> dict[str, str]:
        launcher = launchers.table()["openmpi"]
        path = [launcher.mpirun.parent, Path(sys.executable).parent, os.environ["PATH"]]
        root_flags = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {
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

    def run(self, block: documents.Block) -> str:
        """What the block prints; AssertionError if it fails."""
        command = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
        waiting = UNTIL_JOBS_END if re.search(r"^sbatch ", block.text, re.MULTILINE) else ""
        words = (*command[block.language], block.text + waiting)
        options = {"cwd": self.root, "env": self.environment(), "stderr": subprocess.STDOUT}
        return launchers.execute(*words, timeout=DEADLINE, **options).expect(0).stdout


@contextlib.contextmanager
def make_reader(root: Path) -> Iterator[Reader]:
    """A reader with a new copy of the checkout, whose cluster is taken down at the end."""
    copies.copy(
        launchers.ROOT, root, ignore=lambda _, found: LEFT_OUT.intersection(found), symlinks=True
    )
    for prefix in filter(Path.exists, (launchers.MPICH_PREFIX, launchers.OPEN_MPI_PREFIX)):
        (root / prefix.name).symlink_to(prefix)
    with slurm.make_room() as cluster:
        yield Reader(root, cluster.directory)
        cluster.control("down")


@pytest.fixture(scope="module")
def find_reader(tmp_path_factory) -> Iterator[Callable[[Path], Reader]]:
    """Finds a document's reader; that of the document before is closed first."""
    readers: dict[Path, Reader] = {}
    with contextlib.ExitStack() as stack:

        def find(path: Path) -> Reader:
            if path not in readers:
                stack.close()
                readers.clear()
                made = make_reader(tmp_path_factory.mktemp(path.stem) / "mpiddp")
                readers[path] = stack.enter_context(made)
            return readers[path]

        yield find


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.stem)
def test_lines_are_short(path):
    lines = documents.find_text(path.read_text(encoding="utf-8"))
    assert not [line for line in lines if len(line) > LONGEST_LINE and not WIDE.match(line)]


def test_readme_is_short_and_leads_to_every_chapter():
    text = documents.README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < README_LINES
    chapters = [str(path.relative_to(launchers.ROOT)) for path in documents.CHAPTERS]
    assert [each for each in chapters if f"]({each})" not in text] == []


def uses_slurm(block: documents.Block) -> bool:
    return (
        re.search(r"^(jobs/cluster/|srun |sbatch |salloc |squeue |cat slurm-)", block.text, re.M)
        is not None
    )


def as_parameter(path: Path, block: documents.Block):
    marks = [pytest.mark.slurm if uses_slurm(block) else pytest.mark.mpi]
    if path.stem != BY_DEFAULT:
        marks.append(pytest.mark.long)
    name = re.sub(r"[^\w.]+", "-", block.text.splitlines()[0])[:40].strip("-")
    return pytest.param(path, block, marks=marks, id=f"{path.stem}-{name}")


@pytest.mark.parametrize(
    ("path", "block"),
    [
        as_parameter(path, block)
        for path, blocks in BLOCKS.items()
        for block in filter(is_run, blocks)
    ],
)
def test_a_block_runs_and_prints_what_follows_it(path, block, find_reader):
    obstacle = slurm.find_obstacle() if uses_slurm(block) else None
    if obstacle is not None:
        pytest.skip(obstacle)
    output = find_reader(path).run(block)
    blocks = BLOCKS[path]
    for excerpt in blocks[blocks.index(block) + 1 :][:1]:
        if excerpt.language == "text" and excerpt.follows and excerpt.excuse is None:
            missing = documents.missing_lines(excerpt.text, output)
            assert not missing, f"{missing} not in\n{output}"


@pytest.mark.parametrize("path", documents.DOCUMENTS, ids=lambda path: path.stem)
def test_blocks_say_what_they_are_and_why_they_are_left_out(path, record_property):
    unknown = [block.line for block in BLOCKS[path] if block.language not in LANGUAGES]
    assert not unknown, f"a fence names one of {sorted(LANGUAGES)}: {path.name}, lines {unknown}"
    excused = [block for block in BLOCKS[path] if block.excuse is not None]
    count = sum(map(is_run, BLOCKS[path]))
    record_property("note", f"{path.name}: {count} blocks are run, {len(excused)} are left out")
    for block in excused:
        record_property("note", f"    line {block.line}: {block.excuse}")
        assert block.excuse, f"{path.name}:{block.line}: no-test needs a reason"


OTHERS = [launchers.ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")]


@pytest.mark.parametrize("path", [*documents.DOCUMENTS, *OTHERS], ids=lambda path: path.stem)
def test_folders_that_links_lead_to_are_there(path):
    """The site's test follows all other links."""
    folders = re.findall(r"\]\(([\w./-]+/)\)", path.read_text(encoding="utf-8"))
    assert [each for each in folders if not (path.parent / each).is_dir()] == []


@pytest.mark.parametrize("path", [*documents.DOCUMENTS, *OTHERS], ids=lambda path: path.stem)
def test_what_is_named_of_the_code_is_there(path):
    """``FOLDER/FILE.py`` and ``FOLDER/FILE.py: NAME``, from the top of the checkout."""
    lost = [
        f"{file}: {name}".removesuffix(": ")
        for file, name in documents.find_code_names(path.read_text(encoding="utf-8"))
        if "/" in file and not is_there(file, name)
    ]
    assert not lost


def test_the_table_has_every_algorithm():
    path = launchers.ROOT / "docs/algorithms.md"
    rows = re.findall(r"^\| `([\w-]+)` \|", path.read_text("utf-8"), re.M)
    assert rows == list(registry.names())


def test_the_trainer_chapter_has_every_data_set_and_model():
    text = (launchers.ROOT / "docs/training.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w-]+)`(?: \(default\))? \|", text, re.M)
    assert set(rows) >= {*DATASETS, *MODELS}


def is_there(file: str, name: str) -> bool:
    path = launchers.ROOT / file
    return path.is_file() and (not name or documents.defines(path, name))


FEATURES = (launchers.ROOT / "docs" / "about" / "features.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in FEATURES.splitlines()
    if line.startswith("| ") and not line.startswith(("| expected |", "| feature |"))
]
FIELDS = [field.name.replace("_", "-") for field in dataclasses.fields(Configuration)]
TEST = re.compile(r"`tests/[\w/]+\.py: test_\w+`")
"""That it exists is checked with the other names of code in the documentation."""


def test_each_row_is_shown_by_a_test_or_is_not_there_yet() -> None:
    assert len(ROWS) > 100
    for feature, how, shown in ROWS:
        assert feature and how, feature
        assert shown == "**not yet**" or TEST.fullmatch(shown), feature


def test_options_commands_and_names_are_there() -> None:
    for feature, how, _ in ROWS:
        for option in re.findall(r"`(--[a-z-]+)", how):
            assert option in {*(f"--{each}" for each in FIELDS), *FRONT, *RANKS}, feature
        for module in re.findall(r"`python -m (mpiddp[.\w]*)", how):
            assert importlib.util.find_spec(module) is not None, feature
        for name in re.findall(r"`python -m benchmarks ([\w-]+)", how):
            assert name in BENCHMARKS, feature
        for name in re.findall(r"`mpiddp\.([A-Za-z_.]+)[`(]", how):
            assert name in examples.list_names(), feature
        for path in re.findall(r"`((?:jobs|examples)/[\w./]*)`", how):
            assert (launchers.ROOT / path).exists(), feature


def test_data_sets_are_there() -> None:
    names = {name for _, how, _ in ROWS for name in re.findall(r"`--data ([\w-]+)`", how)}
    assert names and names <= DATASETS.keys()


@pytest.mark.long
@pytest.mark.slurm
def test_a_job_that_fails_fails_its_block(find_reader):
    reader = find_reader(Path("none"))
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

`mpiddp/a.py: Class.method` and `mpiddp/a.py`.

<!-- no-test: needs a cluster -->

```bash
sbatch job
# not a heading
```

~~~python
print("```")
~~~
"""


def test_what_a_text_holds_is_found(tmp_path):
    blocks = documents.find_blocks(SAMPLE)
    assert [(item.line, item.language, item.excuse, item.follows) for item in blocks] == [
        (3, "bash", None, False), (7, "text", None, True), (16, "bash", "needs a cluster", False),
        (21, "python", None, True),
    ]  # fmt: skip
    assert (blocks[0].text, blocks[3].text) == ("echo 12 epochs\n", 'print("```")\n')
    for text, problem in (
        ("<!-- no-test: why -->\nwords\n", "before no block"),
        ("```bash\necho\n", "has no end"),
    ):
        with pytest.raises(ValueError, match=problem):
            documents.find_blocks(text)
    assert documents.find_code_names(SAMPLE) == [
        ("mpiddp/a.py", "Class.method"),
        ("mpiddp/a.py", ""),
    ]
    path = tmp_path / "a.py"
    path.write_text("TABLE: int = 1\nOTHER = 2\nclass Class:\n    def method(self): ...\n")
    assert all(documents.defines(path, n) for n in ("TABLE", "OTHER", "Class", "Class.method"))
    assert not any(documents.defines(path, name) for name in ("method", "Class.other", "X.method"))


@pytest.mark.parametrize(
    ("expected", "printed", "found"),
    [
        ("Epoch 1 - Avg Loss: 0.234567", "Epoch 12 - Avg Loss: 3.1, Accuracy: 4.2%", True),
        ("Master node: …, port 1", "Master node: vm (10.0.0.1), port 4711", True),
        ("Master node: …, port 1", "Master node: vm (10.0.0.1)", False),
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
