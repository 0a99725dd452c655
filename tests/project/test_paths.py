"""The paths of docs/about/architecture.md: a real run passes what they name, in their order."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import launchers
import mpiddp

pytestmark = pytest.mark.mpi

FOLLOWED = launchers.PROGRAMS / "followed.py"
TRAINING = (
    "mpiddp.train", "--data", "toy", "--samples", "200", "--epochs", "1", "--sync", "ring",
    "--overlap", "off", "--save-every", "5steps", "--name", "run", "--console", "all",
)  # fmt: skip
SCRIPT = """
import torch, mpiddp
with mpiddp.init():
    mpiddp.all_reduce(torch.ones(1_000_000))
    import mpiddp.torch_backend
    group = torch.distributed.new_group(backend="mpiddp")
    torch.distributed.all_reduce(torch.ones(1_000_000), group=group)
    model = torch.nn.Linear(3, 2)
    with mpiddp.Checkpointer("checkpoints", model) as checkpointer:
        assert checkpointer.restore() == {"step": 1}
"""


def read_paths() -> list[tuple[str, list[str]]]:
    """Each list of functions, with the heading above it."""
    text = (launchers.ROOT / "docs" / "about" / "architecture.md").read_text()
    found = []
    for section in text.split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        for block in re.findall(r"in this order:\n\n```text\n(.*?)```", section, re.DOTALL):
            found.append((heading, block.splitlines()))
    return found


def follow(name: str, words: Sequence[str], folder: Path, *, fails: bool = False) -> list[str]:
    """The functions that rank 0, or its companion, has entered."""
    arguments = [FOLLOWED, folder / name, *words]
    result = launchers.run("openmpi", 2, arguments, cwd=folder)
    assert (result.returncode != 0) is fails, str(result)
    return (folder / name).read_text().splitlines()


def check(path: Sequence[str], entered: Sequence[str]) -> None:
    assert not [each for each in path if each not in entered]
    assert sorted(path, key=entered.index) == list(path)


def find_path(heading: str, number: int = 0) -> list[str]:
    return [path for found, path in read_paths() if found == heading][number]


def test_a_training_goes_the_paths_of_a_launch_of_a_gradient_and_of_a_checkpoint(tmp_path):
    assert len(read_paths()) == 10  # All of them are followed in this file.
    entered = follow("training", TRAINING, tmp_path)
    for heading in ("a launch", "a step", "a gradient", "a checkpoint"):
        check(find_path(f"The path of {heading}"), entered)


def test_calls_go_their_paths_and_a_checkpoint_its_path_back(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    # A checkpoint belongs to a script.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    with mpiddp.Checkpointer(tmp_path / "checkpoints", torch.nn.Linear(3, 2)) as checkpointer:
        checkpointer.save(1)
    entered = follow("script", ["script.py"], tmp_path)
    check(find_path("The path of mpiddp.all_reduce"), entered)
    check(find_path("The path of a call of torch.distributed"), entered)
    check(find_path("The path of a checkpoint", 1), entered)


def test_a_companion_goes_the_path_of_a_lost_rank(tmp_path):
    check(find_path("The path of a lost rank"), follow("lost", ["lose"], tmp_path, fails=True))


def test_a_call_on_ranks_goes_its_path_here_and_on_a_rank(tmp_path):
    words = (sys.executable, FOLLOWED, tmp_path / "caller", "call")
    launchers.execute(*words).expect(0)
    for number, name in enumerate(("caller", "caller-rank")):
        entered = (tmp_path / name).read_text().splitlines()
        check(find_path("The path of a call on ranks", number), entered)
