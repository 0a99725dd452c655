"""Ranks in a real Jupyter kernel, and what goes wrong in cells; and on nodes of a real cluster."""

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launchers
from mpiddp.errors import ConfigurationError
from mpiddp.remote import call
from mpiddp.remote.cell import LONGEST_TEXT, describe_value
from mpiddp.remote.ipython import find_ranks
from mpiddp.remote.ranks import Ranks

NOTEBOOK = launchers.ROOT / "examples" / "ranks.ipynb"
LONGEST_ERROR = 16
"""Lines."""
MISTAKES = {
    "%%ranks\nx = 1\nx +": "line 3 of this cell: invalid syntax: x +",
    "%%rank 0,2\n1": "%%rank 0,2: there are ranks 0-1",
    "%%rank\n1": "%%rank: expected all, none, or ranks as 0 or 0,3-5, found ''",
    "%%ranks future\n1": "future holds no ranks: write future = mpiddp.ranks(4)",
    "ranks.run(train, (n for n in ()))": "cannot pickle 'generator' object",
}
INTERRUPTED = "%%ranks\nimport time\ntime.sleep(1000)"
INTERRUPT = """import os, signal, threading, time
from mpiddp.remote import call
call.STOP_SECONDS = call.LOST_SECONDS = 60.0
def interrupt():
    while not ranks.state.startswith("running"):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()"""
VALUES = """%%ranks
import threading
lock, text = threading.Lock(), "two\\nlines"
[lock, text][rank]"""
LEFT_OUT = "%%ranks\nlock;"


class Held(Ranks):
    """Of no job."""

    state = "waiting"


PROGRAM = """
import sys
import nbclient, nbformat
from jupyter_client.manager import AsyncKernelManager

file, folder = sys.argv[1:]
notebook = nbformat.read(file, 4)
manager = AsyncKernelManager(transport="ipc", ip=f"{folder}/socket")
nbclient.NotebookClient(notebook, km=manager, timeout=400).execute()
nbformat.write(notebook, file)
"""
"""Runs a notebook. The kernel talks over local sockets, so that no port is chosen."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """For the kernel's sockets, whose paths must be short, and for what else it writes."""
    path = Path(tempfile.mkdtemp(prefix="kernel-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def make_cell(number: int, source: str) -> dict[str, Any]:
    return {
        "cell_type": "code", "id": f"added-{number}", "metadata": {"tags": ["raises-exception"]},
        "source": source, "outputs": [], "execution_count": None,
    }  # fmt: skip


def execute(notebook: dict[str, Any], folder: Path) -> list[Any]:
    file = folder / "notebook.ipynb"
    file.write_text(json.dumps(notebook))
    names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
    env = {name: str(folder / name.lower()) for name in names}
    launchers.run_python("-c", PROGRAM, file, folder, env=env, cwd=folder, timeout=500).expect(0)
    return find_code(json.loads(file.read_text()))


def find_code(notebook: dict[str, Any]) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def read_text(cell: Any) -> str:
    texts = []
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            texts.append("".join(output["text"]))
        elif output["output_type"] == "error":
            texts.append("\n".join(output["traceback"]))
        else:
            texts.append("".join(output["data"].get("text/plain", "")))
    return "".join(texts)


def read_html(cell: Any) -> str:
    return "".join("".join(output["data"]["text/html"]) for output in cell["outputs"])


def check_error(cell: Any, *words: str) -> None:
    """It is red, short, says ``words``, and shows nothing of what is not the user's."""
    text = read_text(cell)
    assert any(output["output_type"] == "error" for output in cell["outputs"]), text
    assert len(text.splitlines()) <= LONGEST_ERROR, text
    assert not [word for word in words if word not in text], text
    assert not re.search(r"\.py|run_cell_magic", text), text


@pytest.mark.mpi
def test_the_notebook_trains_fails_and_starts_again_in_a_real_kernel(folder: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    written = find_code(notebook)
    # What a machine has printed does not belong into the repository.
    assert not [cell for cell in written if cell["outputs"] or cell["execution_count"]]
    sources = [*MISTAKES, VALUES, LEFT_OUT, INTERRUPT, INTERRUPTED, "%%ranks\nrank + 1"]
    # Before the cell in which a rank is lost.
    (at,) = (n for n, cell in enumerate(notebook["cells"]) if "SIGKILL" in "".join(cell["source"]))
    notebook["cells"][at:at] = [make_cell(number, text) for number, text in enumerate(sources)]
    start, train, equal, ranks, total, one, wrong, stacks, *rest = execute(notebook, folder)
    *mistakes, values, left_out, _, interrupted, after, lost, ended, again, gone, close = rest

    assert "2 ranks" in read_text(start)
    assert read_html(start).count("<tr>") == 3 and "waiting" in read_html(start)
    assert re.search(r"\[0\] +100%.*300/300", read_text(train)), read_text(train)
    assert {"[0]", "[1]"} <= set(re.findall(r"(\[\d\]) loss", read_text(train)))
    said, sum_of_ones = read_text(equal).splitlines()
    assert said == "True" and abs(float(sum_of_ones) - 8) < 1
    assert read_text(ranks) == "[0] 0\n[1] 1"
    assert read_text(total) == "[0-1] tensor([3.])"
    assert read_text(one).strip() == "[0] the sum is 3.0"
    check_error(wrong, "on 1 of 2 ranks", "rank 1", "ValueError: no samples", "read_part(rank)")
    place = f"Cell In[{wrong['execution_count']}], line 4, in read_part"
    assert re.search(rf"{re.escape(place)}\n.*raise ValueError", read_text(wrong)), read_text(wrong)
    assert "evaluate" in read_text(stacks) and read_text(stacks).endswith("[0, 1]")

    for cell, text in zip(mistakes, MISTAKES.values(), strict=True):
        check_error(cell, text)
    shown = r"\[0\] <unlocked _thread.lock object at \w+>\n\[1\] 'two\\nlines'"
    assert re.fullmatch(shown, read_text(values))
    assert read_text(left_out) == ""
    # IPython shows where it was raised, whoever hides that, and nothing else of mpiddp's.
    text = read_text(interrupted)
    assert "KeyboardInterrupt" in text and text.count("remote/") == 1
    assert read_text(after) == "[0] 1\n[1] 2"

    check_error(lost, "rank 1", "lost", "restart()")
    assert re.search("rank 1.*SIGKILL", read_text(ended)) and ">lost<" in read_html(ended)
    assert "waiting" in read_text(again) and read_text(gone) == "[0-1] False"
    assert read_text(close) == ""


def test_values_are_wrapped_and_cut() -> None:
    words = "word " * 30
    assert describe_value(words) == repr(words)
    assert describe_value([words, words]).count("\n") > 1
    assert describe_value("x" * (LONGEST_TEXT - 2)) == repr("x" * (LONGEST_TEXT - 2))
    cut = describe_value("x" * LONGEST_TEXT)
    assert cut == "'" + "x" * (LONGEST_TEXT - 1) + "… (2 more characters)"


def test_ranks_are_found_without_a_name_if_they_are_the_only_ones() -> None:
    one, two = Held.__new__(Held), Held.__new__(Held)
    assert find_ranks({"a": one, "alias": one, "_": two, "n": 1}, "") is one
    with pytest.raises(ConfigurationError, match="several hold ranks: name one of a, b"):
        find_ranks({"a": one, "b": two}, "")
    with pytest.raises(ConfigurationError, match="there are no ranks yet"):
        find_ranks({"n": 1}, "")
    assert find_ranks({"a": one, "b": two}, "b") is two


def test_only_who_has_started_ranks_ends_them_and_once() -> None:
    held, ended = Held.__new__(Held), list[None]()
    vars(held).update(_is_closed=False, _owner=0, _take_turn=contextlib.nullcontext)
    vars(held).update(_end=lambda: ended.append(None), interrupt=list, _close_wake=list)
    held.close()
    assert len(ended) == 0
    held._owner = os.getpid()
    held.close()
    held.close()
    assert len(ended) == 1


def test_the_first_rank_is_asked_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [SimpleNamespace(directory=f"/run/{rank}") for rank in range(2)]
    job: Any = SimpleNamespace(members=members)
    monkeypatch.setattr(call, "gather_stacks", str)
    monkeypatch.setattr(call, "describe", lambda stacks, is_full: (stacks, is_full))
    assert call.find_stacks(job, is_full=True) == ("/run/0", True)


def test_functions_run_on_the_ranks_of_two_nodes(slurm_cluster, tmp_path):
    """Called from the shell of an allocation."""
    around = [str(shutil.which("salloc")), "--quiet", "--nodes=2", "--ntasks-per-node=2"]
    around += ["--nodelist=node[1-2]"]
    words = (*around, sys.executable, launchers.PROGRAMS / "calling.py")
    env = {**launchers.WAITING, **slurm_cluster.environment()}
    done = launchers.execute(*words, env=env, cwd=tmp_path, timeout=170).expect(0)
    *printed, last = launchers.drop_gloo_lines(done.stdout).splitlines()
    found = json.loads(last)
    nodes = ["node1", "node2"]
    assert found["hosts"] == nodes
    assert found["seen"] == [[node, 1.0] for node in nodes]
    assert found["equal"] == [True] * 2
    assert "ranks 0-1" in found["stacks"]
    # Of both calls of look.
    assert sorted(printed) == sorted(2 * [f"[{rank}] here is rank {rank}" for rank in range(2)])
    assert list(found["lost"]) == ["1"]
    assert "rank 1 of 2 on node2 was lost: it was killed by SIGKILL" in found["lost"]["1"]
    assert found["again"] == nodes
    assert slurm_cluster.ask("squeue", "-h") == ""
