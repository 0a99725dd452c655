"""Every script in examples/ runs, as its first lines say."""

import ast
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import documents
import launchers
import scripts
from pool import Pools

FOLDER = launchers.ROOT / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))
LONGEST = 40
PRINTED = {
    "digits": r"Epoch 5 - Avg Loss: [\d.]+, Accuracy: [\d.]+%, Test Accuracy: 9\d\.\d+%",
    "comm_hook": r"Step 200: loss [01]\.\d+",
}
"""What some print. All but the first run on the ranks of a pool, which saves a launch."""
MEASURED = {
    "cifar_fsdp": ("test_accuracy", 0.5, 1.0), "own_data": ("test_accuracy", 0.9, 1.0),
    "own_loop": ("test_accuracy", 0.9, 1.0), "small_gpt": ("test_loss", 0.0, 4.5),
    "own_loss": ("test_mean_error", 0.0, 0.1),
}  # fmt: skip
"""A value of the last row of the only run, and its bounds."""


def read_commands(name: str) -> list[list[str]]:
    """The lines of the docstring that are commands, as words."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    return [shlex.split(line) for line in text.splitlines() if line.startswith("python ")]


def read_rows(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def execute(words: Sequence[str], folder: Path) -> str:
    """Run a command of a docstring in ``folder``, with this Python; returns what it prints."""
    changed = [str(FOLDER / Path(word).name) if word.startswith("examples/") else word
               for word in words[1:]]  # fmt: skip
    done = launchers.execute(sys.executable, *changed, cwd=folder, timeout=150)
    return done.expect(0).stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_it_is_started(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert text.count("\n") <= LONGEST
    assert ["python", "-m", "mpiddp", "-n", "2", f"examples/{name}.py"] in read_commands(name)
    assert name in {*PRINTED, *MEASURED, "sweep"}


@pytest.mark.long
@pytest.mark.mpi
def test_an_example_runs_by_its_command(tmp_path: Path) -> None:
    printed = "".join(execute(words, tmp_path) for words in read_commands("digits"))
    assert re.search(PRINTED["digits"], printed), printed


def test_an_example_of_a_loop_with_ddp_prints_its_loss(pool: Pools, tmp_path: Path) -> None:
    path = str(FOLDER / "comm_hook.py")
    printed = pool("openmpi", 2).call(scripts.run, path, cwd=tmp_path).printed
    assert re.search(PRINTED["comm_hook"], printed), printed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("cifar_fsdp", "small_gpt")))
        for name in MEASURED
    ],
)
def test_examples_of_the_trainer_learn(name: str, pool: Pools, tmp_path: Path) -> None:
    key, low, high = MEASURED[name]
    pool("openmpi", 2).call(scripts.run, str(FOLDER / f"{name}.py"), cwd=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    assert low < read_rows(run)[-1][key] <= high


@pytest.mark.long
def test_the_sweep_has_a_run_for_each_rate_and_a_picture(pool: Pools, tmp_path: Path) -> None:
    pool("openmpi", 2).call(scripts.run, str(FOLDER / "sweep.py"), cwd=tmp_path)
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert len(names) == 3
    plot = read_commands("sweep")[1]
    assert names == {word for word in plot if word.startswith("rate-")}
    assert "sweep.svg" in execute(plot, tmp_path)
    picture = (tmp_path / "sweep.svg").read_text()
    assert all(name in picture for name in names)


@pytest.mark.long
@pytest.mark.mpi
def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    """Its cells, one after the other, without Jupyter; times of real ranks are not compared."""
    notebook = json.loads((FOLDER / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n".join("".join(cell["source"]) for cell in cells))
    printed = execute(["python", "cells.py"], tmp_path)
    models = [cell for cell in cells if "train" not in "".join(cell["source"])]
    texts = ["".join(each.get("text", "")) for cell in models for each in cell["outputs"]]
    assert len(texts) > 6 and not documents.missing_lines("".join(texts), printed)
    assert "Training done: test accuracy 9" in printed
