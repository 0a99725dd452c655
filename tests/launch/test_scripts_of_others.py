"""Scripts written for torchrun or for plain Python, run unchanged by ``python -m mpiddp``."""

import json
import os
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import pytest

import launchers
from facts import messages
from mpiddp.errors import ConfigurationError
from mpiddp.launch.script.script import parse, prepare_module, prepare_script

PREFIX = ["-m", "mpiddp"]

SCRIPTS = {
    "helper.py": "HERE = __file__\n",
    "package/__init__.py": "",
    "package/helper.py": "HERE = __file__\n",
    "folder/__main__.py": "import sys\nprint(sys.argv, __name__, __file__, sys.path[0])\n",
    "ends.py": """
        import sys
        how = sys.argv[1]
        def inner():
            raise KeyError("at the bottom")
        if how == "chain":
            import json
            try:
                inner()
            except KeyError:
                json.loads("{")
        sys.exit(how)
    """,
    "syntax.py": "print('never')\nif True\n    pass\n",
    "future.py": """
        from __future__ import annotations
        def f(x: not_defined): return f.__annotations__
        print(f(1), eval("(lambda y: 1).__code__.co_flags") & 0x1000000)
    """,
    # What a script can see of how it was started.
    "see.py": """
    'The docstring.'
    import json, sys
    import helper
    print(json.dumps([
        sys.argv, __name__, __file__, __package__, __doc__, sys.path[0], helper.HERE,
        sys.modules["__main__"].__dict__ is globals(), __builtins__.__name__,
        __cached__, __spec__ and __spec__.name, type(__loader__).__name__,
    ]))
    sys.exit(3)
    """,
    "package/see.py": """
    import json, sys
    from . import helper
    print(json.dumps([
        sys.argv, __name__, __file__, __package__, sys.path[0], helper.HERE,
        sys.modules["__main__"].__dict__ is globals(), __spec__.name, __spec__.origin,
    ]))
    """,
}


@pytest.fixture
def folder(tmp_path):
    for name, text in SCRIPTS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (tmp_path / "below").mkdir()
    return tmp_path


def compare(arguments, folder, cwd=None):
    """Run as plain Python and through mpiddp, alone; both results."""
    plain = launchers.run("alone", 1, arguments, cwd=cwd or folder)
    ours = launchers.run("alone", 1, [*PREFIX, *arguments], cwd=cwd or folder)
    assert ours.returncode == plain.returncode, f"{plain}\n{ours}"
    assert ours.stdout == plain.stdout
    return plain, ours


def said(result):
    """stderr without the start-up block."""
    lines = result.stderr.splitlines(keepends=True)
    if "mpiddp: started\n" in lines:
        begin = lines.index("mpiddp: started\n")
        end = next(i for i, line in enumerate(lines) if line.startswith("  seconds ")) + 1
        lines = lines[:begin] + lines[end:]
    return "".join(lines)


def test_a_script_sees_what_plain_python_shows(folder):
    words = ["../see.py", "--timeout", "5", "-m", "x"]
    plain, ours = compare(words, folder, cwd=folder / "below")
    # Not vacuous: the script did see its own arguments.
    assert json.loads(plain.stdout)[0] == words
    assert (plain.returncode, plain.stderr, said(ours)) == (3, "", "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("-m package.see --help", '"__main__"'), ("folder a", "['folder', 'a'] __main__"),
        ("future.py", "{'x': 'not_defined'}"), ("ends.py text", ""), ("syntax.py", ""),
    ],
)  # fmt: skip
def test_modules_folders_and_ends_are_plain_pythons(folder, words, shown):
    plain, ours = compare(words.split(), folder)
    assert shown in plain.stdout and said(ours) == plain.stderr


def test_a_traceback_is_plain_pythons(folder):
    plain, ours = compare(["ends.py", "chain"], folder)
    assert plain.returncode == 1 and plain.stderr.count("Traceback") == 2
    assert said(ours) == plain.stderr


# Under several ranks

TRAIN = """
    import atexit, json, os, sys, threading, time
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self): return 6
        def __getitem__(self, i): return torch.tensor(float(i * i))

    def main():
        facts = {"before": dist.is_initialized(), "launched": dist.is_torchelastic_launched()}
        if sys.argv[1] == "bare":
            dist.init_process_group()
        elif sys.argv[1] == "gloo":
            dist.init_process_group("gloo", init_method="env://")
        else:
            time.sleep(0.3)
            dist.init_process_group(
                "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )
        rank = dist.get_rank()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        facts |= {"argv": sys.argv, "name": __name__, "sum": total.item(), "workers": {}}
        facts["world"] = [rank, dist.get_world_size()]
        # A worker that is spawned imports torch again: on one rank alone.
        methods = ("fork", "spawn") if sys.argv[1] == "bare" else ()
        for method in methods[: 2 - rank]:
            loader = DataLoader(Squares(), 4, num_workers=1, multiprocessing_context=method)
            facts["workers"][method] = [batch.sum().item() for batch in loader]
        dist.barrier()
        dist.destroy_process_group()
        with open(f"{rank}.json", "w") as file:
            json.dump(facts, file)

    if __name__ == "__main__":
        if sys.argv[1] == "late":
            atexit.register(lambda: print("left with rank", os.environ["RANK"], flush=True))
            threading.Thread(target=main).start()
        else:
            main()
"""


def train(row, ranks, arguments, folder, **env):
    """Run the torchrun script; the finished job and what each rank found."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    command = [*PREFIX, "--timeout", "60", "train.py", *arguments]
    result = launchers.run(row, ranks, command, cwd=folder, env=env).expect(0)
    return result, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def check(found, ranks, arguments):
    for rank, facts in enumerate(found):
        assert facts["before"] is False and facts["launched"] is True
        assert facts["argv"] == ["train.py", *arguments] and facts["name"] == "__main__"
        assert facts["world"] == [rank, ranks]
        assert facts["sum"] == ranks * (ranks + 1) / 2


# 0 + 1 + 4 + 9, and 16 + 25
BATCHES = [14.0, 41.0]


@pytest.mark.parametrize("name", launchers.list_names("openmpi4", "mpich"))
def test_a_torchrun_script_with_workers(name, tmp_path):
    result, found = train(name, 2, ["bare", "--epochs", "3"], tmp_path)
    check(found, 2, ["bare", "--epochs", "3"])
    assert [facts["workers"] for facts in found] == [
        {"fork": BATCHES, "spawn": BATCHES},
        {"fork": BATCHES},
    ]
    assert "backend         left to the script (gloo)" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.mpi
def test_threads_and_exit_functions_still_find_the_launch(tmp_path):
    """A thread, which gives its rank itself, makes the group when the script has ended."""
    result, found = train("openmpi", 2, ["late"], tmp_path)
    check(found, 2, ["late"])
    assert {"left with rank 0", "left with rank 1"} <= set(result.stdout.splitlines())


def test_a_script_that_calls_init_is_described_once_and_a_misplaced_option_noted(tmp_path):
    script = tmp_path / "calls.py"
    script.write_text(
        "import os, mpiddp\nwith mpiddp.init(timeout=90) as session:\n"
        "    print(session.backend, os.environ['MASTER_PORT'])\n"
    )
    arguments = [*PREFIX, "--port-range", "23000-23999", script, "--tuning", "x"]
    result = launchers.run("alone", 1, arguments).expect(0)
    backend, port = result.stdout.split()
    assert backend in ("gloo", "nccl") and 23000 <= int(port) <= 23999
    assert result.stderr.count("mpiddp: started") == 1
    assert "--tuning stands after" in result.stderr


# Mistakes


def test_a_module_that_is_not_found_is_a_mistake_and_what_it_lacks_is_not(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    Path("lacking.py").write_text("import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        prepare_module("lacking", [])()
    for name, words in (("json.absent", "No module named json.absent"), ("xml", "xml.__main__")):
        with pytest.raises(ConfigurationError, match=f"-m {name}: .*{words}"):
            prepare_module(name, [])()
    for name, words in (("none.pyz", "is no script 'none.pyz' in "), (".", "has no __main__.py")):
        with pytest.raises(ConfigurationError, match=words):
            prepare_script(name, [])
    with pytest.raises(ConfigurationError, match="no module named 'absent'"):
        prepare_module("absent.part", [])  # Before MPI starts, not when it runs.


def test_an_archive_is_in_the_path_in_place_of_mpiddps_folder(monkeypatch, tmp_path, capsys):
    archive = str(tmp_path / "app.pyz")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import sys; print(sys.argv, sys.path[:2])")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["of mpiddp", "second", *sys.path])
    prepare_script(archive, ["x"])()
    assert capsys.readouterr().out == f"{[archive, 'x']} {[archive, 'second']}\n"


@pytest.mark.by_default("mpich")
def test_mistakes_of_every_rank_are_said_once(either_launcher):
    words = ["--console", "3-5", "-m", "timeit"]
    (line,) = messages(launchers.run(either_launcher, 3, [*PREFIX, *words]).expect(2))
    assert "out of 0-2" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--timeout", "5", "s.py", "-m"], ("auto", 5.0, False, None, ["s.py", "-m"])),
        (["-mjson.tool", "x"], ("auto", 300.0, False, "json.tool", ["x"])),
        (["--allow-shared-gpu", "--interface=^lo", "s.py"], ("^lo", 300.0, True, None, ["s.py"])),
        (["--interface=e", "--", "-odd.py"], ("e", 300.0, False, None, ["-odd.py"])),
    ],
)
def test_options_end_where_the_script_begins(arguments, expected):
    options, module, rest = parse(arguments)
    found = (options.interface, options.timeout, options.allow_shared_gpu, module, rest)
    assert found == expected
    with pytest.raises(ConfigurationError, match="-n is for what starts ranks, and this process"):
        parse(["-n", "2", *arguments])


def test_a_pipe_is_read_once(tmp_path):
    script = tmp_path / "script.py"
    os.mkfifo(script)
    text = "print('script ran')\n"
    threading.Thread(target=script.write_text, args=(text,), daemon=True).start()
    result = launchers.run("alone", 1, [*PREFIX, str(script)])
    assert (result.returncode, result.stdout) == (0, "script ran\n")


def test_a_scripts_own_excepthook_shows_its_exceptions(tmp_path):
    script = tmp_path / "hooked.py"
    # A debugger's hook talks to its user, and so needs the main thread.
    show = "lambda kind, error, trace: print('hooked', error, threading.current_thread().name)"
    script.write_text(
        "import sys, threading  # Knows --site_defaults.\n"
        f"sys.excepthook = {show}\nraise ValueError('by me')\n"
    )
    _, ours = compare([script, "--site-defaults", "x"], tmp_path)
    assert ours.returncode == 1 and ours.stdout == "hooked by me MainThread\n"
    assert "Traceback" not in ours.stderr and "stands after" not in ours.stderr


@pytest.mark.mpi
def test_a_mistake_in_a_later_init_ends_the_job_as_a_mistake(tmp_path):
    script = tmp_path / "again.py"
    again = "for _ in range(2):\n    with mpiddp.init() as session: assert session.any(True)\n"
    script.write_text(f"import mpiddp\n{again}mpiddp.init(timeout=-1)\n")
    result = launchers.run("openmpi", 2, [*PREFIX, script]).expect(2)
    started, message = messages(result)
    assert started == "mpiddp: started" and "timeout: expected" in message
    assert message.startswith("mpiddp: rank 0 of 2 on ")
