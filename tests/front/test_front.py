"""One command starts ranks: which role a process has, what it starts, and how it ends."""

import errno
import hashlib
import importlib.machinery
import json
import os
import pwd
import re
import shlex
import signal
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchmarks.__main__ as benchmarks
import launchers
import mpiddp
from copies import write_program
from mpiddp import __main__
from mpiddp.checkpoints.storage.manifest import (
    CHECKPOINTS,
    CONFIGURATION,
    make_name,
    make_partial_name,
)
from mpiddp.errors import ConfigurationError
from mpiddp.front import attempt, front, launch_plan
from mpiddp.front.job_end import Exit, repeats
from mpiddp.front.rank_command import make_rank_command
from mpiddp.launch.script import command_line, other_words
from mpiddp.launch.script.command_line import (
    COMMANDS,
    FRONT,
    RANKS,
    READER,
    UNDERSCORED,
    split,
    take_words,
    underscore,
)
from mpiddp.launch.script.front_options import FrontOptions
from mpiddp.process import cpus, job_directory
from mpiddp.training.options import config

SECONDS = 120
MPIDDP = [sys.executable, "-m", "mpiddp"]
HELLO = """
import os, sys
import torch.distributed as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
count, most = (os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS"))
sys.stdout.write(f"rank {rank} of {size}, restart {count} of {most}, {sys.argv[1:]}\\n")
sys.stdout.flush()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A directory with a script, in which no job and no launcher's variables are."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if launchers.INHERITED.fullmatch(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "hello.py").write_text(HELLO)
    return tmp_path


def run(*words: str, **variables: str) -> launchers.Result:
    """``python -m mpiddp WORDS``, as a person types it."""
    environment = {**launchers.WAITING, **variables}
    return launchers.run_python(*MPIDDP[1:], *words, env=environment, cwd=None)


WORD = st.binary(max_size=20).map(lambda word: os.fsdecode(word.replace(b"\0", b"")))
HARD = (
    *(":", "::", "", " ", "a b", "a\nb", "'", '"', "\\", "$HOME", "%", "%t", "a=b", "=", "-", "--"),
    *("--map-by", "--bind-to", "--rank-by", "--runtime-options", "--np", "-n", "-x"),
    *("_", UNDERSCORED, "\udcff"),
)
"""Words that a launcher, a shell or an encoding could take for something else."""


@given(st.lists(st.sampled_from(HARD) | WORD), st.sampled_from((1, 400)))
def test_the_words_of_a_rank_are_nothing_to_a_launcher(words, times):
    words *= times
    found = underscore(words)
    assert take_words(found) == words and len(found) <= 901
    assert all(word == UNDERSCORED or word.startswith(("_", "[")) for word in found)
    # What a person types reaches the script as it is.
    assert take_words(["script.py", *words]) == ["script.py", *words]


def test_help_explains_the_options_of_the_front_and_of_the_ranks(capsys):
    with pytest.raises(SystemExit):
        READER.read(["--help"])
    explained = re.findall(r"(?m)^  (--?[a-z-]+)", capsys.readouterr().out)
    assert sorted(explained) == sorted({*FRONT, *RANKS} - {"--python", "--help"})


def test_every_option_of_torchrun_is_explained():
    from torch.distributed.run import get_args_parser

    unnamed = [
        names
        for action in get_args_parser()._actions
        if (names := action.option_strings) and not any(other_words.explain(name) for name in names)
    ]
    assert unnamed == [["-h", "--help"]]


TABLES = {**other_words.LAUNCHERS, "other trainers": other_words.TRAINER}


@pytest.mark.parametrize("head", TABLES)
def test_the_documentation_has_the_tables_of_others_words(head):
    text = (launchers.ROOT / "docs" / "coming-from-torchrun.md").read_text()
    found = re.search(rf"\| `?{head}`? \| .*\n\|---\|---\|\n", text)
    assert found is not None
    table = text[found.end() :].partition("\n\n")[0]
    rows = TABLES[head]
    assert table.splitlines() == [f"| {names} | {what} |" for names, what in rows.items()]


def list_typed(text: str) -> set[str]:
    """The options in what is to be typed for mpiddp itself."""
    own = [part for part in re.findall(r"`([^`]*)`", text) if not part.startswith("mpirun ")]
    return set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", " ".join(own).replace(' "--mca', "")))


def test_what_to_type_exists_and_what_is_explained_does_not():
    trainer = {f"--{name.replace('_', '-')}" for name in config.from_keywords({}).__dict__}
    trainer |= {"--config"}
    for launcher, rows in other_words.LAUNCHERS.items():
        for names, text in rows.items():
            assert list_typed(text) <= {*FRONT, *RANKS, "-m"}, (launcher, text)
            assert all(map(other_words.explain, re.findall(r"`(--?[\w-]+)", names))), names
    for names, text in other_words.TRAINER.items():
        assert list_typed(text) <= {*trainer, "-n", "-m"}, text
        given = {each.replace("_", "-") for each in re.findall(r"`(--?[\w-]+)", names)}
        assert not given & trainer, names
        assert all(other_words.explain_training(each) for each in given)
    named = re.findall(r"`([\w-]+)`", " ".join(other_words.OTHER_COMMANDS))
    assert len(named) == len({*named}) and not {*named} & COMMANDS.keys()
    # `checkpoint` is more likely meant for `checkpoints`, which is beside it.
    measuring = re.findall(r"`([\w-]+)`", next(iter(other_words.OTHER_COMMANDS)))
    assert {*measuring} == benchmarks.COMMANDS.keys() - COMMANDS.keys() - {"checkpoint"}


def test_the_trainer_names_options(folder):
    words = ["--data", "toy", "--samples", "8", "--batch-size", "90", "--quiet"]
    done = launchers.run_python("-m", "mpiddp.train", *words, cwd=folder)
    share = "expected at most 7, a rank's share of 7 training samples on 1 ranks, found 90"
    assert (done.returncode, done.stderr) == (2, f"mpiddp: --batch-size: {share}\n")


def test_the_help_has_a_line_for_every_command():
    listed = re.findall(r"mpiddp (?:\[OPTIONS\] )?([a-z|]+)", command_line.USAGE)
    assert sorted("|".join(listed).split("|")) == sorted(command_line.COMMANDS)


@pytest.fixture
def dry(folder, monkeypatch, capsys):
    """The words of the line that --dry-run prints."""

    def read(*words: str) -> list[str]:
        assert call(["--dry-run", *words], monkeypatch) == 0
        assert not (folder / "state").exists()
        return launchers.read_words(shlex.split(capsys.readouterr().out))

    return read


def test_a_prefix_reaches_the_ranks(dry, monkeypatch):
    # Where the ranks are in a container, their Python and script may be as well.
    monkeypatch.setenv("MPIDDP_WRAP", "nice -n '1'")
    words = dry("-n", "1", "--python", "py", "gone.py")
    assert words[-7:] == ["nice", "-n", "1", "py", "-m", "mpiddp", "gone.py"]


@pytest.mark.parametrize(
    ("words", "kept", "own", "program"),
    [
        ("-m mpiddp", "", "./train :", "./train :"),
        ("-um mpiddp", " -u", "-m mpiddp.train :", "train :"),
        ("/bin/mpiddp", "", "-- -odd.py", "-- -odd.py"),
        ("-B -X dev -Wdefault -m mpiddp", " -B -X dev -Wdefault", "-mthis x", "-m this x"),
        (
            "--check-hash-based-pycs always -mmpiddp",
            " --check-hash-based-pycs always",
            "doctor -u",
            "doctor -u",
        ),
    ],
)
def test_what_each_rank_runs(folder, monkeypatch, words, kept, own, program):
    for name in ("train", "-odd.py"):
        (folder / name).touch()
    own = ["-n", "2", *own.split()]
    monkeypatch.setattr(sys, "argv", ["mpiddp", *own])
    monkeypatch.setattr(sys, "orig_argv", ["python", *words.split(), *own])
    found = launchers.read_words(make_rank_command(split(own), FrontOptions()))
    assert " ".join(found) == f"{sys.executable}{kept} -m mpiddp {program}"


def test_a_module_that_only_a_hook_of_the_import_finds(folder, monkeypatch):
    """As an editable installation of setuptools does."""

    def find_spec(name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, None) if name == "editable" else None

    line = split(["-n", "2", "-m", "editable.part"])
    with pytest.raises(ConfigurationError, match="no module named 'editable'"):
        make_rank_command(line, FrontOptions())
    monkeypatch.setattr(
        sys, "meta_path", [*sys.meta_path, types.SimpleNamespace(find_spec=find_spec)]
    )
    assert make_rank_command(line, FrontOptions())[-2:] == ["_-m", "_editable.part"]


def test_devices_are_a_number_of_ranks_on_this_machine_alone(monkeypatch):
    words = ["--devices", "cpu", "script.py"]

    def settle(*more: str) -> int | None:
        line = split([*more, *words])
        return front._settle_ranks(line, command_line.read_front(line)).ranks

    assert settle() == len(os.sched_getaffinity(0))
    assert settle("-n", "99") == 99
    assert settle("--hosts", "a:4,b:4") is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert settle() is None


def test_a_rank_starts_no_ranks_and_a_version_needs_none(folder):
    done = run("-n", "2", "hello.py", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "-n is for what starts ranks, and this process is one" in done.stderr
    done = run("-n", "2", "--version")
    assert (done.returncode, done.stdout) == (0, f"mpiddp {mpiddp.__version__}\n")


def test_all_of_the_launchers_options_stand_before_the_number_of_ranks(dry):
    words = dry("-n", "2", "--launcher-options", "-x 'A B'", "--launcher-options=-v", "hello.py")
    at = words.index("-x")
    assert words[at : at + 5] == ["-x", "A B", "-v", "-n", "2"]


def test_a_policy_of_the_user_replaces_ours_since_open_mpi_refuses_two():
    words = ("--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE", "--host", "a:2", "-n", "2")
    mapped = (*words[:2], *words[4:6], "--map-by", "core", *words[6:])
    assert launch_plan._insert(words, ("--map-by", "core")) == mapped
    bound = (*words[2:6], "--bind-to=core", *words[6:])
    assert launch_plan._insert(words, ("--bind-to=core",)) == bound


def test_what_is_set_stays_and_what_is_needed_comes(dry, monkeypatch):
    plain = dry("-n", "2", "hello.py")
    assert plain[0] == "env" and "OMPI_MCA_pml=ob1" in plain
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    assert "OMPI_MCA_pml=ob1" not in dry("-n", "2", "hello.py")


@pytest.mark.parametrize(
    ("given", "gpus", "ranks"),
    [
        ("hello.py", "0,1,2", 3),
        ("hello.py", "", cpus.count_cores()),
        ("--devices 0,2 hello.py", "0,1,2", 2),
        ("train --devices=cpu", "0,1,2", cpus.count_cores()),
    ],
)
def test_auto_is_one_rank_per_gpu_else_per_core(dry, monkeypatch, given, gpus, ranks):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    words = dry("-n", "auto", *given.split())
    assert words[words.index("-n") + 1] == str(ranks)
    # The ranks choose their threads, however many ranks there are.
    assert not any(word.startswith("OMP_NUM_THREADS=") for word in words)


@pytest.mark.mpi
def test_a_shell_that_mpirun_has_started_starts_ranks_though_it_has_no_home(tmp_path):
    """As in services and jobs of cron: Open MPI's mpirun needs a home."""
    (tmp_path / "say.py").write_text("import os\nos.write(1, os.environ['HOME'].encode())\n")
    line = shlex.join(["env", "-u", "HOME", *MPIDDP, "-n", "2", "say.py"])
    words = ["-c", f"import os; os.execlp('sh', 'sh', '-c', {line!r})"]
    result = launchers.run("openmpi", 1, words, cwd=tmp_path).expect(0)
    assert result.stdout == 2 * pwd.getpwuid(os.getuid()).pw_dir, result


@pytest.mark.by_default("openmpi")
def test_the_line_of_a_dry_run_can_be_pasted(either_launcher, folder):
    """With more ranks than this machine has cores, and perhaps as root."""
    ranks = len(os.sched_getaffinity(0)) + 1
    (folder / "say.py").write_text("print('a rank')\n")
    words = ("-n", str(ranks), "--launcher", str(either_launcher.mpirun), "say.py")
    line = run("--dry-run", *words).stdout
    pasted = launchers.execute(
        "sh", "-c", line.replace("-m mpiddp --underscored _say.py", "say.py"), timeout=SECONDS
    )
    assert pasted.stdout == "a rank\n" * ranks, line + pasted.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("-n x hello.py", "-n: expected auto or an integer from 1 to 1000000000"),
        ("-n 2 -n 3 hello.py", "-n is given twice"),
        ("-n", "-n expects a value, N: Ranks; or auto"),
        ("-n 2 --hlep x", "unknown option --hlep (did you mean --help?)"),
        ("-n 2", "no SCRIPT given; python"),
        ("-n 2 -", "each rank reads the script, and '-' is what this process reads alone: save"),
        ("-n 2 /dev/fd/0", "and '/dev/fd/0' is what this process reads alone"),
        ("-n 2 --hosts hello.py", "given: hello.py was taken for the value of --hosts;"),
        ("--hosts a:2 b:2 hello.py", "b:2 stands where the script does: type --hosts a:2,b:2\n"),
        ("-n 2 --site-defaults x.toml hello.py", "does: type --site-defaults=x.toml\n"),
        ("--hostfile= hello.py", "mpiddp: --hostfile: expected PATH, found ''\n"),
        ("-n 2 below", "'below' is a directory without a __main__.py"),
        ("-n 2 -m no.such", "no module named 'no'"),
        ("-n 2 -m", "-m expects the name of a module"),
        ("-n 2 --epochs 3 hello.py", "unknown option --epochs; options of the script"),
        ("-n 2 trian", "(did you mean train?)"),
        ("-n 2 train --learning-rat 1", "mpiddp: unknown option --learning-rat (did you mean --le"),
        ("-n 2 train --model mpl", "mpiddp: --model: expected one of auto, convnet"),
        ("-n 2 train --name done", "mpiddp: --name: the run runs/done has finished and is not"),
        ("-n 2 doctor --output gone/x.json", "mpiddp: gone/x.json cannot be written: there is no"),
        ("-n 2 --master_addr=x x", "of torchrun and deepspeed; for mpiddp, leave it out: MPI kno"),
        ("-np 2 x", "-np is an option of mpirun and horovodrun; for mpiddp, type -n N\n"),
        ("-N2 x", "in a scheduler's job or with --hosts; as an option of srun, type --nodes N\n"),
        ("-n 2 prove", "(for mpiddp, type python -m mpiddp bench prove)"),
        ("-n 2 simualte", "(did you mean bench simulate?)"),
        ("-n 2 launch", "(for mpiddp, type python -m mpiddp -n N SCRIPT)"),
        ("-n 2 --console 5,2-3 hello.py", "--console 5,2-3 names none of the job's ranks"),
        ("-n 2 --timeout 3 train", "--timeout belongs after train"),
        ("-n 2 stacks", "stacks starts no ranks"),
        ("train -n 2 --data toy", "-n stands after train: put it before\n"),
        ("hello.py -n 2", "-n stands after hello.py, so it would go to the script"),
        ("-n 2 --dry-run=yes hello.py", "--dry-run takes no value"),
        ("--nodes 2 hello.py", "--nodes counts the nodes of a job"),
        ("--launcher /no/mpirun hello.py", "'/no/mpirun' is not a program"),
        ('--launcher-options "\'" -n 1 hello.py', "cannot be split into words"),
        ("--launcher srun hello.py", "this shell has none: submit jobs/run.sbatch, or get one"),
        ("--launcher none -n 1 hello.py", "leave out -n, --nodes and --ranks-per-node"),
        ("--launcher none --launcher-options -v hello.py", "and --launcher is none"),
        ("--launcher none --debug hello.py", "--debug is for ranks that are started here"),
        ("--restarts 1 --restart-window nan hello.py", "--restart-window: expected 0 or more"),
        ("--restart-window 9 hello.py", "--restart-window has no effect without restarts: add -"),
        ("--min-nodes 2 hello.py", "counts the nodes of a job, and this shell"),
        ("--restarts 1 --min-nodes 2 --launcher none hello.py", "with --launcher none the prog"),
        ("-n 100000000 hello.py", "-n 100000000 is more than 64 ranks per core"),
        ("--python /no/python -n 1 hello.py", "--python names '/no/python' as the program that"),
        ("-n 1 --job-log hello.py/logs hello.py", "cannot write to"),
        ("-n 2 --job-log logs hello.py", "--job-log"),
        ("-n 1 --log-dir hello.py/logs hello.py", "hello.py/logs"),
        ("-n 1 train --tuning=below", "--tuning: below cannot be read: Is a directory"),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(folder, monkeypatch, capsys, words, part):
    (folder / "below").mkdir()
    (folder / "logs" / f"job-{job_directory.choose_name()}.err").mkdir(parents=True)
    (folder / "runs" / "done").mkdir(parents=True)
    (folder / "runs" / "done" / "outcome.json").write_text('{"code": 0}')
    monkeypatch.setattr(
        attempt.Launch, "run", lambda *_, **__: pytest.fail("something was started")
    )
    code = call(shlex.split(words), monkeypatch)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("mpiddp: ") and part in captured.err


def call(words: Sequence[str], monkeypatch) -> int:
    """The exit code of the front, in this process."""
    before = {number: signal.getsignal(number) for number in attempt.PASSED_ON}
    monkeypatch.setattr(sys, "argv", ["mpiddp", *words])
    monkeypatch.setattr(sys, "orig_argv", [*MPIDDP, *words])
    try:
        line = split(words)
    except ConfigurationError as error:
        front.say(str(error))
        return error.exit_code
    with pytest.raises(SystemExit) as caught:
        front.run(line, __main__.find_check(line))
    for number, handler in before.items():
        signal.signal(number, handler)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("words", ["-m package.module", "package", "package/module.py"])
def test_a_syntax_error_is_found_before_anything_starts(folder, monkeypatch, capsys, words):
    text = b"# coding: none\n" if "/" in words else b"return 1\n"
    monkeypatch.setattr(launch_plan, "find_mpirun", lambda _: pytest.fail("it is being started"))
    (folder / "package").mkdir()
    script = folder / "package" / ("__main__.py" if words == "package" else "module.py")
    (folder / "package" / "__init__.py").write_text("raise SystemExit(7)  # Not run.")
    script.write_bytes(text)
    assert call(["-n", "2", *words.split()], monkeypatch) == 1
    said = capsys.readouterr().err
    assert "SyntaxError: " in said and "Traceback" not in said
    # As Python itself says it, apart from mistakes in bytes, where it names no file.
    assert text[0] in b"#" or said == launchers.run_python(script).stderr


def test_a_directory_that_was_deleted_starts_nothing(folder, monkeypatch, capsys):
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    assert call(["-n", "2", "../hello.py"], monkeypatch) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "the current directory has been deleted" in line
    with pytest.raises(ConfigurationError, match="the current directory has been deleted"):
        mpiddp.ranks(2)


@pytest.fixture
def allocation(folder, monkeypatch) -> Path:
    """A job on two nodes of four cores, with programs that only answer."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, text in {
        "scontrol": 'case "$1" in requeue) echo "$*" >>asked;; --oneliner) cat state;; '
        '*) cat "$RECORD";; esac',
        "srun": 'printf "%s\\n" "$@" >srun.words; env >srun.environment; exit "${STATUS:-0}"',
    }.items():
        write_program(bin_folder / name, text)
    (folder / "record").write_text(
        "JobId=7 JobName=run\n   NodeList=n[1-2]\n   NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=1 \n"
    )
    (folder / "state").write_text("JobId=7 JobName=x JobState=RUNNING Reason=None\n")
    variables = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}", "RECORD": str(folder / "record"),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
        "SLURM_GPUS_PER_NODE": "1",
    }  # fmt: skip
    launchers.set_variables(monkeypatch, variables)
    return folder


@pytest.mark.parametrize(
    ("library", "text", "pmi"),
    [
        ("libmpi.so.12", "", "pmi2"),
        ("libmpi.so.12", "'--with-pmix=/usr'", "pmix"),
        ("libmpi_cray.so.12", "", "cray_shasta"),
    ],
)
def test_srun_is_told_what_the_library_speaks(allocation, monkeypatch, capsys, library, text, pmi):
    path = allocation / library
    monkeypatch.setenv("CRAY_MPICH_VERSION", "8.1.25")  # A module that an MPICH was loaded beside.
    path.write_text(text)
    monkeypatch.setenv("MPI4PY_LIBMPI", str(path))
    assert call(["--dry-run", "hello.py"], monkeypatch) == 0
    assert f"--mpi={pmi}" in shlex.split(capsys.readouterr().out)
    monkeypatch.setenv("MPIDDP_PMI", "cray_shasta")
    assert call(["--dry-run", "hello.py"], monkeypatch) == 0
    assert "--mpi=cray_shasta" in shlex.split(capsys.readouterr().out)


def test_intel_mpi_in_a_slurm_job_fills_its_nodes(allocation, monkeypatch, capsys):
    said = "Intel(R) MPI Library for Linux* OS, Version 2021.19.0"
    write_program(allocation / "bin" / "mpiexec.hydra", f"echo '{said}'")
    words = ["--dry-run", "--launcher", str(allocation / "bin" / "mpiexec.hydra")]
    assert call([*words, "--ranks-per-node", "3", "hello.py"], monkeypatch) == 0
    found = shlex.split(capsys.readouterr().out)
    assert {"I_MPI_HYDRA_BOOTSTRAP=slurm", "I_MPI_PIN=off", "n1,n2"} <= {*found}
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "1,4")
    monkeypatch.delenv("SLURM_GPUS_PER_NODE")
    assert call([*words, "-n", "5", "hello.py"], monkeypatch) == 2
    assert "cannot give different numbers of ranks to the nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "job", "is_front"),
    [
        ("hello.py", "", False), ("-m this", "7", True), ("train --epochs 1", "7", True),
        ("stacks", "7", False), ("train --help", "7", False), ("-n 2 --help", "", False),
        ("-n 2 hello.py --help", "", True),
    ],
)  # fmt: skip
def test_who_is_the_front(folder, monkeypatch, words, job, is_front):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    assert __main__._is_front(split(words.split())) == is_front
    # What a launcher has started is a rank.
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "0")
    line = split(words.split())
    assert not __main__._is_front(line)
    # A rank may start ranks, if it asks for some.
    assert __main__._is_front(line, is_started_by_rank=True) == (is_front and bool(line.front))


class Attempts:
    """Stands for the launcher: ends attempts as it is told, and keeps how they were started."""

    def __init__(self, monkeypatch, *ends: Exit, seconds: float = 0.0) -> None:
        self.ends = ends
        self.seconds = seconds
        self.commands: list[list[str]] = []
        self.variables: list[Mapping[str, str]] = []
        self.offers: list[bool] = []
        self.report: Mapping[str, object] | None = None
        """What the first one writes, which is the doctor's."""
        monkeypatch.setattr(
            attempt.Launch, "run", lambda _, *given, **more: self.run(*given, **more)
        )
        self.monkeypatch = monkeypatch

    def run(
        self, command: list[str], variables: Mapping[str, str], _: object, offers_input: bool
    ) -> Exit:
        end = self.ends[len(self.commands)]
        if self.report is not None and not self.commands:
            path = Path(variables["MPIDDP_JOB_DIRECTORY"], "preflight.json")
            path.write_text(json.dumps(self.report))
        self.offers.append(offers_input)
        self.commands.append(command)
        self.variables.append(variables)
        time.sleep(self.seconds)
        if end.outcome is not None:
            path = Path(variables["MPIDDP_JOB_DIRECTORY"], "outcome.json")
            path.write_text(json.dumps(end.outcome))
        return end

    def start(self, *words: str) -> int:
        return call([*words, "hello.py"], self.monkeypatch)

    @property
    def counts(self) -> list[str]:
        return [each["TORCHELASTIC_RESTART_COUNT"] for each in self.variables]


def lost(host: str) -> Exit:
    return Exit(137, outcome={"code": 6, "reason": "rank 1 was lost", "lost_host": host})


def test_all_ranks_are_started_again_until_they_succeed(folder, monkeypatch, capsys):
    monkeypatch.setenv("PBS_NODEFILE", "no/such/file")
    attempts = Attempts(monkeypatch, Exit(137, outcome={"code": 6}), Exit(1), Exit(0))
    assert attempts.start("-n", "2", "--restarts", "3") == 0
    assert attempts.counts == ["0", "1", "2"]
    # Each attempt is another one, in the same directory, which goes at the end.
    assert len({each["MPIDDP_ATTEMPT_TOKEN"] for each in attempts.variables}) == 3
    [directory] = {each["MPIDDP_JOB_DIRECTORY"] for each in attempts.variables}
    assert not Path(directory).exists()
    said = capsys.readouterr().err
    assert "exit code 6: " in said and "restart 1 of 3" in said
    # The outcome of the attempt before is not this one's.
    assert "exit code 1: " in said and "restart 2 of 3" in said
    assert said.count("no/such/file cannot be read") == 1, "what is odd about the hosts, once"


@pytest.mark.parametrize("code", [0, 2, 3, 5, 75, 130])
def test_what_would_end_in_the_same_way_is_not_started_again(folder, monkeypatch, capsys, code):
    attempts = Attempts(monkeypatch, Exit(code), Exit(0))
    assert attempts.start("-n", "2", "--restarts", "3") == code
    assert len(attempts.commands) == 1
    # A script may have chosen the code, and its user waits for a restart.
    said = f"mpiddp: attempt ended with exit code {code}: ", "; there is no restart after this code"
    err = capsys.readouterr().err
    assert all((part in err) == (code in (2, 3, 5)) for part in said)
    # Nor where the outcome says so, whatever the launcher's code is.
    attempts = Attempts(monkeypatch, Exit(137, outcome={"code": code}), Exit(0))
    assert attempts.start("-n", "2", "--restarts", "3") == code
    assert len(attempts.commands) == 1


def test_standard_input_is_offered_to_a_rank_of_this_host(folder, allocation, monkeypatch):
    attempts = Attempts(monkeypatch, *[Exit(0)] * 6)
    # srun gives it to rank 0 itself; the job's first node is another host.
    for words in ([], ["--launcher", "mpirun"]):
        assert attempts.start("-n", "2", *words) == 0
    monkeypatch.setattr(attempt, "is_host", lambda *_: True)
    assert attempts.start("-n", "2", "--launcher", "mpirun") == 0
    assert attempts.offers == [False, False, True]
    monkeypatch.delenv("SLURM_JOB_ID")
    for options in ("--tag-output", "--stdin all", "--stdin=1"):
        assert attempts.start("-n", "2", f"--launcher-options={options}") == 0
    assert attempts.offers[3:] == [True, False, False]


def test_an_attempt_that_cannot_begin_leaves_the_code_of_the_one_before(
    folder, monkeypatch, capsys
):
    attempts = Attempts(monkeypatch, Exit(4), Exit(0))
    begin = job_directory.begin_attempt

    def fail_later(path, token):
        if attempts.commands:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        begin(path, token)

    monkeypatch.setattr(job_directory, "begin_attempt", fail_later)
    assert attempts.start("-n", "2", "--restarts", "1") == 4
    assert "no restart: cannot write to" in capsys.readouterr().err


def test_what_cannot_be_said_changes_no_code(allocation, monkeypatch):
    words = ("-n", "2", "--requeue", "--job-log", "logs")
    with open("/dev/full", "w") as full:
        for stream in (None, full):
            monkeypatch.setattr(sys, "stderr", stream)
            monkeypatch.setattr(sys, "stdout", stream)
            assert Attempts(monkeypatch, Exit(75)).start(*words) == 75
    assert (allocation / "asked").read_text() == "requeue 7\n" * 2


def test_the_report_reads_only_the_end_of_the_errors(folder, monkeypatch, capsys):
    def fill(_, command, variables, files, **more: object) -> Exit:
        Path(files.error).write_bytes(b"first\n" + b"x" * (1 << 20) + b"\nlast\n")
        return Exit(1)

    monkeypatch.setattr(attempt.Launch, "run", fill)
    variables = {"MPIDDP_WRAP": "env A=b", "MPIDDP_ENVIRONMENT": "/its/own"}
    launchers.set_variables(monkeypatch, variables)
    assert call(["-n", "2", "--job-log", "logs", "hello.py"], monkeypatch) == 1
    before, said = capsys.readouterr()
    rows = dict(line.split(maxsplit=1) for line in before.splitlines())
    assert [rows["environment"], rows["prefix"]] == ["/its/own", "env A=b"], before
    assert said.endswith("x\nlast\n") and "first" not in said and len(said) < 1 << 17


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_signal_between_two_attempts_ends_the_job(folder, monkeypatch, number, code):
    attempts = Attempts(monkeypatch, Exit(1), Exit(0))
    report = front.say

    def be_stopped(text: str) -> None:
        os.kill(os.getpid(), number)
        report(text)

    monkeypatch.setattr(front, "say", be_stopped)
    assert attempts.start("-n", "2", "--restarts", "1") == code
    assert len(attempts.commands) == 1


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Exit(143, "", signal.SIGTERM), "mpiddp: stopped by SIGTERM: exit code 143\n"),
        (Exit(1, "", signal.SIGINT), "mpiddp: stopped by SIGINT: exit code 130\n"),
        # A rank has reported; or the script has chosen its exit code.
        (Exit(143, "", signal.SIGTERM, outcome={"code": 143}), ""),
        (Exit(75, "", signal.SIGTERM), ""),
        (Exit(143), ""),
    ],
)
def test_a_job_that_was_asked_to_end_says_so_once(folder, monkeypatch, capsys, end, said):
    Attempts(monkeypatch, end).start("-n", "2")
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("words", "outcome", "said"),
    [
        (["-m", "mpiddp.train"], {"code": 1}, "this run, type the same command with --name 'a b'"),
        (["train", "--name=a b"], {"code": 75}, "type the same command\n"),
        (["train"], {"code": 2}, None),
        (["train"], {"code": 6, "path": None}, None),
        (["hello.py"], {"code": 1}, None),
    ],
)
def test_a_run_that_can_be_continued_is_named(folder, monkeypatch, capsys, words, outcome, said):
    run = folder / "runs" / "a b"
    (run / CHECKPOINTS / make_name(50)).mkdir(parents=True)
    Attempts(monkeypatch, Exit(1, outcome={"path": str(run / "outcome.json"), **outcome}))
    call(["-n", "2", *words], monkeypatch)
    text = capsys.readouterr().err
    assert said in text if said else "to continue" not in text


@pytest.mark.parametrize(
    ("options", "found", "expected"),
    [
        ("", make_partial_name(50, "attempt-1"), "there is no checkpoint in "),
        ("checkpoint_dir = 'other'", make_name(50), "there is no checkpoint in other"),
        ("resume = 'never'", make_name(50), "--resume never"),
    ],
)
def test_a_run_that_begins_anew_is_promised_nothing(
    folder, monkeypatch, capsys, options, found, expected
):
    run = folder / "runs" / "first"
    (run / CHECKPOINTS / found).mkdir(parents=True)
    (run / CONFIGURATION).write_text(options)
    outcome = {"path": str(run / "outcome.json"), "code": 130}
    Attempts(monkeypatch, Exit(1, outcome=outcome))
    call(["-n", "2", "train"], monkeypatch)
    text = capsys.readouterr().err
    assert expected in text and "to continue" not in text
    assert text.endswith("the same command with --name first begins this run anew\n")


def test_after_an_attempt_that_was_long_enough_restarts_are_counted_anew(folder, monkeypatch):
    ends = [Exit(1)] * 3 + [Exit(0)]
    attempts = Attempts(monkeypatch, *ends, seconds=0.05)
    assert attempts.start("-n", "2", "--restarts", "1", "--restart-window", "0.02") == 0
    assert attempts.counts == ["0", "1", "2", "3"]
    attempts = Attempts(monkeypatch, Exit(1), Exit(4), Exit(0))
    assert attempts.start("-n", "2", "--restarts", "1", "--restart-window", "60") == 4
    assert attempts.counts == ["0", "1"]


def test_a_node_that_was_named_is_left_out(allocation, monkeypatch, capsys):
    attempts = Attempts(monkeypatch, lost("n2.cluster"), Exit(0))
    assert attempts.start("--restarts", "1", "--ranks-per-node", "2") == 0
    assert not any(word.startswith("--exclude") for word in attempts.commands[0])
    assert {"--exclude=n2", "--nodes=1", "--ntasks=2"} <= set(attempts.commands[1])
    assert "restart 1 of 1, without n2" in capsys.readouterr().err
    # One that was only named is kept where it is needed.
    attempts = Attempts(monkeypatch, lost("n2"), Exit(0))
    assert attempts.start("--restarts", "1", "--min-nodes", "2") == 0
    assert "--nodes=2" in attempts.commands[1]


def test_the_node_of_the_front_lives_whatever_a_rank_that_was_cut_off_says(allocation, monkeypatch):
    here = os.uname().nodename
    monkeypatch.setenv("SLURM_JOB_NODELIST", f"{here},n2")
    record = allocation / "record"
    record.write_text(record.read_text().replace("n[1-2]", f"{here},n2"))
    attempts = Attempts(monkeypatch, lost(here), Exit(0))
    assert attempts.start("--restarts", "1") == 0
    assert "--nodes=2" in attempts.commands[1]
    # A fault that the rank itself has met is another matter.
    fault = {"code": 1, "reason": "RuntimeError: ECC", "host": here, "node_fault": "its GPU"}
    faulty = Attempts(monkeypatch, Exit(1, outcome=fault), Exit(0))
    assert faulty.start("--restarts", "1", "--nodes", "1") == 0
    assert "--nodelist=n2" in faulty.commands[1]
    # The first step may hold the nodes for a while, until Slurm has given up one of them.
    assert ["--overlap" in command for command in attempts.commands] == [False, True]


ENDED = {"code": 4, "reason": "no answer", "host": "n2"}
BAD = {"check": "GPUs", "status": "fail", "found": "no answer", "hosts": ["n2.cluster"], "code": 1}


@pytest.mark.parametrize(
    ("words", "rows", "code", "said"),
    [
        ("", [], 0, "2 of 2 nodes passed the preflight"),
        ("--nodes 1 --timeout 900", [BAD], 0, "1 of 2 nodes passed the preflight"),
        ("--min-nodes 1", [BAD], 0, "n2 fails the preflight: GPUs: no answer"),
        ("", [BAD], 3, "1 of 2 nodes passed the preflight, and 2 are needed"),
        # What warns, or does not matter to a script, keeps nobody out; what all have ends the job.
        ("", [{**BAD, "status": "warn"}, {**BAD, "check": "run directory"}], 0, "2 of 2 nodes"),
        ("--min-nodes 1", [{**BAD, "hosts": ["n1", "n2"]}], 3, "the job fails the preflight: GPUs"),
        ("--min-nodes 1", None, 3, "the job fails the preflight: exit code 4"),
        ("--min-nodes 1", ENDED, 3, "the job fails the preflight: no answer"),
        ("--min-nodes 1", {**ENDED, "node_fault": "GPU"}, 0, "n2 fails the preflight: no answer"),
    ],
)
def test_nodes_are_examined_before_the_ranks_start(
    allocation, monkeypatch, capsys, words, rows, code, said
):
    attempts = Attempts(monkeypatch, Exit(4, outcome=rows if type(rows) is dict else None), Exit(0))
    attempts.report = {"complete": True, "findings": rows} if type(rows) is list else None
    assert attempts.start("--preflight", "--ranks-per-node", "1", *words.split()) == code
    assert said in capsys.readouterr().err
    assert len(attempts.commands) == (1 if code else 2) and "--nodes=2" in attempts.commands[0]
    assert ("_900" in attempts.commands[0]) is ("900" in words)
    assert code or ("--exclude=n2" in attempts.commands[1]) is ("n2 fails" in said or BAD in rows)


def test_a_preemption_during_the_preflight_is_no_fault_of_a_node(folder, monkeypatch, capsys):
    attempts = Attempts(monkeypatch, Exit(138, preemption=signal.SIGUSR1), Exit(0))
    assert attempts.start("-n", "2", "--preflight") == 75
    assert len(attempts.commands) == 1
    assert (
        capsys.readouterr().err == "mpiddp: preempted during the preflight: no rank was started\n"
    )


ERROR = {"code": 1, "reason": "KeyError: 3 at 0x7f", "host": "n1", "step": None}
RUN, FAULT = {**ERROR, "path": "x"}, {**ERROR, "node_fault": "x"}
LOSS = {**ERROR, "code": 6, "lost_rank": 1, "lost_host": "n1"}
CRASH = {**LOSS, "reason": "rank 1 on n1 was lost: it was killed by SIGSEGV"}
SILENT = {**LOSS, "reason": "rank 1 on n1 was lost: it is silent"}
LEFT = {**LOSS, "reason": "rank 1 on n1 left early: it left with exit code 1 without closing"}


@pytest.mark.parametrize(
    ("before", "found", "seconds", "is_same"),
    [
        (ERROR, {**ERROR, "host": "n2"}, 1, True),
        # A script's own text may say how far it came; of a step that is known it need not.
        (ERROR, {**ERROR, "reason": "KeyError: 4 at 0x55f"}, 1, False),
        (RUN, {**RUN, "reason": "KeyError: 4 at 0x7f"}, 1, True),
        # Any error may be behind an exit code.
        ({**ERROR, "reason": "SystemExit: 1"}, {**ERROR, "reason": "SystemExit: 1"}, 1, False),
        (LEFT, LEFT, 1, False),
        (ERROR, {**ERROR, "code": 4}, 1, False),
        (ERROR, {**ERROR, "reason": ""}, 1, False),
        (ERROR, None, 1, False),
        # A script that ran for long may have taken many steps; a trainer's run says which.
        (ERROR, ERROR, 1000, False),
        (RUN, RUN, 1000, True),
        (RUN, {**RUN, "step": 5}, 1, False),
        # Two machines that fail are no fault of the script's; crashes are, wherever they happen.
        (FAULT, {**FAULT, "host": "n2"}, 1, False),
        (FAULT, FAULT, 1, True),
        (SILENT, {**SILENT, "lost_host": "n2"}, 1, False),
        (CRASH, {**CRASH, "lost_host": "n2", "reason": CRASH["reason"].replace("1", "2")}, 1, True),
    ],
)
def test_the_same_error_before_any_step_is_not_tried_a_third_time(
    folder, monkeypatch, capsys, before, found, seconds, is_same
):
    assert repeats(Exit(1, "", None, found, seconds=seconds), Exit(1, outcome=before)) is is_same
    if seconds == 1:
        attempts = Attempts(
            monkeypatch, *[Exit(1, outcome=each) for each in (before, found)], Exit(0)
        )
        assert (attempts.start("-n", "2", "--restarts", "5") != 0) is is_same
        assert ("no restart: the attempt before" in capsys.readouterr().err) is is_same


def test_with_too_few_nodes_left_there_is_no_restart(allocation, monkeypatch, capsys):
    # Slurm has taken the second node from the job.
    record = allocation / "record"
    record.write_text(record.read_text().replace("n[1-2]", "n1"))
    attempts = Attempts(monkeypatch, Exit(1), Exit(1), Exit(0))
    assert attempts.start("--restarts", "1", "--min-nodes", "2") == 1
    assert "1 of 2 nodes left" in capsys.readouterr().err
    assert attempts.start("--restarts", "1") == 0
    assert "--exclude=n2" in attempts.commands[2]


def test_a_job_that_was_preempted_is_requeued_where_asked(allocation, monkeypatch):
    asked = allocation / "asked"
    assert Attempts(monkeypatch, Exit(75)).start("-n", "2") == 75
    assert not asked.exists()
    assert Attempts(monkeypatch, Exit(75)).start("-n", "2", "--requeue") == 75
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert Attempts(monkeypatch, Exit(75)).start("-n", "2", "--requeue") == 75
    assert Attempts(monkeypatch, Exit(6)).start("-n", "2", "--requeue") == 6
    # Cancelled, or requeued by Slurm itself.
    (allocation / "state").write_text("JobId=7 JobName=x JobState=COMPLETING Reason=None\n")
    assert Attempts(monkeypatch, Exit(75)).start("-n", "2", "--requeue") == 75
    assert asked.read_text() == "requeue 7\nrequeue 5_3\n"


REQUEUE = ["--requeue"]


@pytest.mark.parametrize(
    ("variable", "words", "code"),
    [("SGE_TASK_ID", [], 75), ("OAR_NODEFILE", REQUEUE, 99), ("LSB_JOBID", REQUEUE, 75)],
)
def test_other_schedulers_are_told_by_an_exit_code(variable, words, code, tmp_path, monkeypatch):
    (tmp_path / "hello.py").touch()
    (tmp_path / "nodes").write_text("localhost\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, str(tmp_path / "nodes"))
    assert Attempts(monkeypatch, Exit(75)).start("-n", "1", *words) == code
    assert Attempts(monkeypatch, Exit(6)).start("-n", "1", *words) == 6


@pytest.mark.parametrize("after", ["PENDING", "RUNNING"])
def test_a_requeue_that_ends_scontrol_is_one(after, allocation, monkeypatch, capfd):
    scontrol = allocation / "bin" / "scontrol"
    ended = f'echo "JobId=7 JobState={after} x" >state; kill -TERM $$'
    scontrol.write_text(scontrol.read_text().replace('echo "$*" >>asked', ended))
    assert Attempts(monkeypatch, Exit(75)).start("-n", "2", "--requeue") == 75
    assert ("the job was not requeued" in capfd.readouterr().err) is (after == "RUNNING")


def start(launcher, ranks: int, words: Sequence[str], **more):
    """A job whose ranks the front starts with this mpirun."""
    options = ["-m", "mpiddp", "-n", str(ranks), "--launcher", str(launcher.mpirun)]
    return launchers.start("alone", 1, [*options, *words], **more)


@pytest.mark.parametrize("name", launchers.list_names())
def test_words_reach_the_script_as_they_were_typed(name, folder):
    """Past the launcher and a prefix, also long lists of files."""
    launcher = launchers.find(name)
    (folder / "words.py").write_text(WORDS)
    words = [*HARD, *(f"/data/file-{number:05d}.bin" for number in range(3_000))]
    with start(launcher, 1, ["--quiet", "words.py", *words], env={"MPIDDP_WRAP": "env"}) as job:
        done = job.wait().expect(0)
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, words))).hexdigest()
    assert done.stdout == f"{digest}\n" and done.stderr.count("hint") == 0


COLON = "have the word ':', which a launcher reads as its own"


@pytest.mark.parametrize(
    ("words", "wrap", "said"),
    [
        (["hello.py"], "sh -c ':' :", COLON),
        (["--python", ":", "hello.py"], "", COLON),
        (["hello.py"], "no-such exec image", "MPIDDP_WRAP names 'no-such'"),
    ],
)
def test_what_stands_before_a_program_is_one_that_can_be_started(
    folder, monkeypatch, capsys, words, wrap, said
):
    (folder / "bin").mkdir()
    write_program(folder / "bin" / ":", "exit 0")
    variables = {"MPIDDP_WRAP": wrap, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    launchers.set_variables(monkeypatch, variables)
    assert call(["-n", "2", *words], monkeypatch) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


WORDS = """
import hashlib, os, sys
# It names RANK: no hint.
print(hashlib.sha256(b"\\0".join(map(os.fsencode, sys.argv[1:]))).hexdigest(), flush=True)
"""


@pytest.mark.by_default("openmpi")
def test_ranks_that_failed_are_started_again(either_launcher, folder):
    (folder / "failing.py").write_text(
        HELLO + "if count == '0' and rank == 1: raise RuntimeError('the first time it fails')"
    )
    with start(either_launcher, 2, ["--restarts", "1", "failing.py", "--lr", "1"]) as job:
        done = job.wait().expect(0)
    assert done.stderr.count("RuntimeError: the first time it fails") >= 1
    assert "restart 1 of 1" in done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2, restart 1 of 1, ['--lr', '1']" in done.stdout


WAITING = """
import os, pathlib, signal, subprocess, time
# It holds the rank's output, and nobody else would end it.
subprocess.Popen(["sleep", "1000"])
said = pathlib.Path(f"said-{os.environ['RANK']}")

def say(number, _):
    said.write_text(str(number))
    if number == signal.SIGINT:
        # The first rank that ends has the launcher end the other.
        while {path.read_text() for path in pathlib.Path().glob("said-*")} != {str(number)}:
            time.sleep(0.01)
        os._exit(128 + number)

signal.signal(signal.SIGINT, say)
signal.signal(signal.SIGUSR1, say)
said.touch()
time.sleep(600)
"""


@pytest.mark.by_default("openmpi")
def test_signals_reach_the_ranks(either_launcher, folder):
    (folder / "waiting.py").write_text(WAITING)
    with start(either_launcher, 2, ["--restarts", "2", "waiting.py"]) as job:
        await_words(folder, "")
        for number in (signal.SIGUSR1, signal.SIGINT):
            os.kill(job.process.pid, number)
            await_words(folder, str(int(number)))
        done = job.wait()
    # A job that was interrupted is not started again.
    assert (done.returncode, "restart" in done.stderr) == (130, False)


def await_words(folder: Path, text: str) -> None:
    launchers.until(
        lambda: [path.read_text() for path in folder.glob("said-*")] == [text] * 2, f"{text!r}"
    )


def test_the_front_imports_nothing_heavy():
    code = "import sys, mpiddp.__main__, mpiddp.front.front; print(*sys.modules)"
    done = launchers.run_python("-c", code, check=True)
    heavy = {"torch", "numpy", "mpi4py", "psutil", "asyncio", "tempfile"}
    assert not heavy & set(done.stdout.split())
