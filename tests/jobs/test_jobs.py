"""The job scripts: what they decide, with a Slurm that only says what it was asked to do, and
what becomes of it on a real cluster (marker ``slurm``)."""

import contextlib
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import copies
import launchers
import mpiddp.errors
from mpiddp.checkout import scripts
from mpiddp.front.job_end import describe_code
from mpiddp.front.launch_plan import make_plan
from mpiddp.launch.script import command_line
from mpiddp.launch.script.front_options import FrontOptions
from slurm import FINISHED, Cluster

JOBS = launchers.ROOT / "jobs"
TRAIN = shlex.quote(f"{JOBS}/train.sbatch")
SCRIPTS = ("train", "sweep", "benchmark", "run")
TOY = ("--data", "toy", "--samples", "200", "--epochs", "1")
JOB_SECONDS = 150

PYTHON = sys.executable
"""Runs the front; no rank is started by these fakes."""

SCONTROL = """
case "$1 $2" in
"--oneliner show") echo "JobId=42 JobName=train JobState=${FAKE_STATE:-RUNNING} Reason=None" ;;
"show job") cat "$FAKES/record" ;;
"show hostnames") IFS=, && printf '%s\\n' $3 ;;
esac
"""
SRUN = """
printf '%s\\0' "$@" >"$FAKES/srun.arguments"
env -0 >"$FAKES/srun.environment"
for argument; do
    case $argument in --error=*) error=${argument#*=} ;; esac
done
case " $* " in *" --open-mode=append "*) ;; *) : >"$error" ;; esac
seq -f "line %g of ${FAKE_RANKS:-the ranks}" "${FAKE_LINES:-30}" >>"$error"
[ -z "${FAKE_OUTCOME:-}" ] || printf '{\\n  "code": %s,\\n  "rank": 0\\n}\\n' "$FAKE_OUTCOME" \\
    >"$MPIDDP_JOB_DIRECTORY/outcome.json"
printf '%b' "${FAKE_MESSAGES:-}" >&2
exit "${FAKE_STATUS:-0}"
"""
FRONT = 'case "$1 $2" in "-m mpiddp") printf "%s\\0" "${@:5}" >"$FAKES/front.arguments" ;; esac'
SBATCH = """
printf '%s\\0' "$@" >"$FAKES/sbatch.$(($(ls "$FAKES" | grep -c '^sbatch')))"
for argument; do [ "$argument" != --refuse ] || exit 1; done
echo "$((40 + $(ls "$FAKES" | grep -c '^sbatch')));cluster"
"""


def record(nodes: Sequence[tuple[str, str]], *, tasks: int, command: str, array: bool) -> str:
    """A job's record as ``scontrol show job -d`` of Slurm 22.05 writes it, cut to what counts."""
    rows = "\n".join(f"     Nodes={hosts} CPU_IDs=0 Mem=0 GRES={gres}" for hosts, gres in nodes)
    return f"""JobId=42{" ArrayJobId=42 ArrayTaskId=1" if array else ""} JobName=train
   JobState=RUNNING Reason=None Dependency=(null)
   ReqNodeList=(null) ExcNodeList=(null)
   NumNodes={len(nodes)} NumCPUs=8 NumTasks={tasks} CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:6
{rows}
   Command={command}
   WorkDir=/somewhere

JobId=43 ArrayJobId=42 ArrayTaskId=0 JobName=train
   NumNodes=1 NumCPUs=1 NumTasks=99 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
     Nodes=elsewhere CPU_IDs=0 Mem=0 GRES=gpu:9(IDX:0-8)
   TresPerNode=gres:gpu:9

"""


def describe_job(nodes: Sequence[tuple[str, str]], cpus: str) -> dict[str, str]:
    """What Slurm exports to a job."""
    return {
        "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": ",".join(hosts for hosts, _ in nodes),
        "SLURM_JOB_CPUS_PER_NODE": cpus, "SLURM_TASKS_PER_NODE": f"1(x{len(nodes)})",
    }  # fmt: skip


LINKS = {"jobs", "mpiddp", "benchmarks"}
OWN = ["--launcher", "srun", "--job-log", "logs", "--requeue"]
"""What the job scripts tell the front."""
BLOCKED = ["env", "--block-signal=USR1,USR2"]
NO_PYTHON = {"MPIDDP_PYTHON": "", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}


@dataclass
class MadeUp:
    """A Slurm of fakes, a checkout whose path has a space, and a directory to submit from."""

    bin: Path
    fakes: Path
    root: Path
    cwd: Path
    spool: Path
    variables: dict[str, str] = field(default_factory=dict)

    def program(self, name: str, text: str) -> None:
        copies.write_program(self.bin / name, text, "bash")

    def run(self, script: str | Path, *arguments: str, **variables: str):
        own = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "FAKES": str(self.fakes),
            "XDG_STATE_HOME": str(self.fakes / "state"),
            **self.variables,
        }
        env = {**own, **variables}
        return launchers.execute("bash", script, *arguments, env=env, cwd=self.cwd)

    def submit(
        self,
        name: str,
        *arguments: str,
        nodes: Sequence[tuple[str, str]] = (("n1", ""),),
        cpus: str = "4",
        tasks: int = 1,
        array: bool = False,
        command: str | None = None,
        **variables: str,
    ):
        """Run a script as Slurm does: a copy of it, in the directory that it was submitted from."""
        copy = self.spool / "slurm_script"
        copies.copy(JOBS / f"{name}.sbatch", copy)
        if command is None:
            command = " ".join([f"{self.root}/jobs/{name}.sbatch", *arguments])
        text = record(nodes, tasks=tasks, command=command, array=array)
        (self.fakes / "record").write_text(text)
        job = {
            **describe_job(nodes, cpus), "SLURM_JOB_NAME": name, "SLURM_SUBMIT_DIR": str(self.cwd)
        }  # fmt: skip
        return self.run(copy, *arguments, **{**job, **variables})

    def read_refusal(self, done: launchers.Result) -> str:
        """The one line of a script that has started nothing."""
        assert (done.returncode, done.stdout) == (2, "") and not self.started, done
        [line] = done.stderr.splitlines()
        return line

    def front(self, name: str, *arguments: str, **more: Any) -> list[str]:
        """Submit with a front that starts nothing: the words that it got, behind its own."""
        self.submit(name, *arguments, MPIDDP_PYTHON=str(self.bin / "front"), **more).expect(0)
        words = (self.fakes / "front.arguments").read_text().split("\0")[:-1]
        assert words[: len(OWN)] == OWN
        return words[len(OWN) :]

    @property
    def srun(self) -> list[str]:
        """The arguments that srun got."""
        return (self.fakes / "srun.arguments").read_text().split("\0")[:-1]

    @property
    def options(self) -> list[str]:
        """Those that say how many ranks there are and where."""
        names = ("ntasks", "distribution", "nodelist", "nodes", "gpu", "overcommit")
        return [word for word in self.srun if word.lstrip("-").startswith(names)]

    @property
    def exported(self) -> dict[str, str]:
        """The environment that srun got."""
        words = (self.fakes / "srun.environment").read_text().split("\0")[:-1]
        return dict(word.split("=", 1) for word in words)

    @property
    def program_line(self) -> list[str]:
        """What each rank is, without what blocks signals until it has handlers."""
        words = launchers.read_words(self.srun)
        words = words[next(at for at, word in enumerate(words) if not word.startswith("-")) :]
        assert words[: len(BLOCKED)] == BLOCKED
        return words[len(BLOCKED) :]

    @property
    def started(self) -> bool:
        return any((self.fakes / f"{each}.arguments").exists() for each in ("srun", "front"))


@pytest.fixture
def made_up(tmp_path) -> MadeUp:
    paths = [tmp_path / name for name in ("bin", "fakes", "check out", "sub mit", "spool")]
    for path in paths:
        path.mkdir()
    made = MadeUp(*paths)
    fakes = {"scontrol": SCONTROL, "srun": SRUN, "sbatch": SBATCH, "front": FRONT}
    for name, text in {**fakes, "scancel": 'echo "$*" >"$FAKES/scancelled"'}.items():
        made.program(name, text)
    for name in LINKS:
        (made.root / name).symlink_to(launchers.ROOT / name)
    made.variables["MPIDDP_PYTHON"] = PYTHON
    return made


def lines(text: str) -> dict[str, str]:
    """The block at the head of a job's output, by the name of each line."""
    return {row[2:14].strip(): row[15:] for row in text.splitlines() if row.startswith("  ")}


# ---- text that every script holds ------------------------------------------------------------


def test_the_header_asks_for_no_resources():
    # A directory would have to be there, and a count would defeat the user's. A job that can be
    # continued is told before its time is up, and may be requeued; what it has written stays then.
    # The signal goes to the ranks, which are ready for it, and not to this script alone (B:USR2).
    for name in SCRIPTS:
        text = (JOBS / f"{name}.sbatch").read_text()
        continued = ["signal=USR2@120", "requeue", "open-mode=append"] * (name != "benchmark")
        expected = [f"job-name={name}", *continued, *["no-kill"] * (name == "run")]
        assert re.findall(r"^#SBATCH --(.*)|^#SBATCH.*", text, re.MULTILINE) == expected


def test_every_job_script_finds_the_checkout_in_the_same_way(made_up):
    """sbatch copies one file: the search cannot stand in another one."""
    begin, end = "# Slurm runs a copy of this file.", 'source "$jobs/slurm.sh"\n'
    line = made_up.read_refusal(made_up.submit("train", *TOY, command="(null)"))
    assert str(made_up.cwd) in line and "submit train.sbatch by its path" in line
    texts = [path.read_text() for path in sorted(launchers.ROOT.glob("jobs/*.sbatch"))]
    searches = {text[text.index(begin) : text.index(end)] for text in texts}
    assert len(texts) == len(SCRIPTS) and len(searches) == 1
    for name in SCRIPTS:
        line = made_up.read_refusal(made_up.run(JOBS / f"{name}.sbatch", "--epochs", "1"))
        assert line.startswith("mpiddp: this is a job script; submit it: sbatch ")
        assert f"jobs/{name}.sbatch" in line


# ---- where the checkout is -------------------------------------------------------------------


def own(made_up: MadeUp) -> None:
    """Make the checkout one that nobody but its owner can change, whatever the umask was."""
    copy_jobs(made_up)
    for path in (made_up.root, *made_up.root.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o022)


def test_else_it_is_around_the_submit_directory_if_no_other_user_can_write_it(made_up):
    own(made_up)
    directory = made_up.root / "some" / "where"
    directory.mkdir(parents=True)
    for command in ("(null)", "/gone/jobs/train.sbatch a b", "/x/mine.sh"):
        assert made_up.front("train", *TOY, command=command, SLURM_SUBMIT_DIR=str(directory))
    (made_up.fakes / "front.arguments").unlink()
    (made_up.root / "jobs" / "slurm.sh").write_text("touch planted\n")

    def expect_refusal() -> None:
        done = made_up.submit("train", *TOY, command="(null)", SLURM_SUBMIT_DIR=str(made_up.root))
        line = made_up.read_refusal(done)
        assert not (made_up.cwd / "planted").exists()
        assert f"{made_up.root} is passed over" in line and "by its path" in line

    for part in (".", "jobs", "jobs/slurm.sh", "jobs/environment.sh"):
        path = made_up.root / part
        mode = path.stat().st_mode
        path.chmod(mode | 0o022)
        expect_refusal()
        path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(made_up.root / "jobs" / "slurm.sh", 65534, 65534)
        expect_refusal()
    # One that is named is run, whoever it belongs to.
    copies.copy(JOBS / "slurm.sh", made_up.root / "jobs" / "slurm.sh").chmod(0o666)
    assert made_up.front("train", *TOY)


def test_started_by_its_path_a_script_uses_its_own_checkout(made_up):
    (made_up.fakes / "record").touch()
    job = describe_job([("n1", "")], "1")
    made_up.run(made_up.root / "jobs" / "train.sbatch", *TOY, **job).expect(0)
    assert made_up.started


# ---- nodes, ranks, cores ---------------------------------------------------------------------

UNEVEN = (("n1", "gpu:1(IDX:0)"), ("n2", "gpu:2(IDX:0-1)"))
PLAIN = (("n1", ""), ("n2", ""))


@pytest.mark.parametrize("launcher", ["srun", "none"])
def test_what_is_no_number_is_refused(made_up, monkeypatch, launcher):
    (made_up.fakes / "record").write_text(record(PLAIN, tasks=1, command="x", array=False))
    own = {"PATH": f"{made_up.bin}:{os.environ['PATH']}", "FAKES": str(made_up.fakes)}
    job = {**describe_job(PLAIN, "4(x2)"), "SLURM_CPUS_PER_TASK": "abc"}
    launchers.set_variables(monkeypatch, launchers.clean_environment({**own, **job}))
    said = "SLURM_CPUS_PER_TASK is 'abc', but Slurm sets it to a whole number"
    with pytest.raises(mpiddp.errors.ConfigurationError, match=said):
        make_plan(FrontOptions(launcher=launcher))


def bash(text: str, *arguments: str) -> str:
    words = ("bash", "-c", f"source jobs/slurm.sh; {text}", "test", *arguments)
    done = launchers.execute(*words, cwd=launchers.ROOT).expect(0)
    assert done.stderr == ""
    return done.stdout


# The function alone: chain.sh would submit jobs. Beside it the shell's own.
SPLIT = """source <(sed -n "/^split_words()/,/^}/p" jobs/chain.sh)
for text; do
    split_words "$text"; printf "%s\\0" "${WORDS[@]}" END
    eval "WORDS=($text)"; printf "%s\\0" "${WORDS[@]}" END
done"""


WORDS = r"""
''|'a'|a|"a"|'a b'"c d"e\ f|''a""|a '' b|a ''|"" a|\'\"\\\ |'\'|'"'|"'"|"\"\\\$\`"|"\a\'\ "|
a	b|'a	b'|  a   b  |\*~\$\;\&\#\{\}'*~$;&#{}'"*~;&#{}"|é'é'"é"\é|-x '--a=b c' "d"|a\
b|"a\
b"|'a\
b'|a \
 b|"a
b"|'a'\''b'
"""


def test_words_are_split_as_the_shell_itself_does():
    found = bash(SPLIT, *WORDS.strip().split("|")).split("END\0")[:-1]
    assert found[::2] == found[1::2] and len(found) == 2 * len(WORDS.split("|"))


# ---- srun, the environment, the logs ---------------------------------------------------------


def test_srun_is_told_what_no_setting_may_change(made_up):
    # A name may hold anything; in srun's --output, % and \\ mean something.
    name = "a b/c%j\\" + "é" * 99
    given = ("GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "NTASKS_PER_GPU", "TRES_PER_TASK")
    contradicting = {f"SLURM_{each}": "3" for each in given}
    job = {"nodes": UNEVEN, "cpus": "1,2", "SLURM_JOB_NAME": name, **contradicting}
    done = made_up.submit("train", *TOY, **job).expect(0)
    assert {"--mpi=pmix", "--kill-on-bad-exit=1", "--export=ALL"} <= set(made_up.srun)
    forbidden = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *contradicting}
    assert forbidden.isdisjoint(made_up.exported)
    assert made_up.exported["SRUN_CPUS_PER_TASK"] == "1"
    assert made_up.options == [
        "--nodes=2", "--ntasks=3", "--distribution=arbitrary", "--nodelist=n1,n2,n2", "--gpus=3",
    ]  # fmt: skip
    block = lines(done.stdout)
    assert block["ranks"] == "2 nodes, 1+2 = 3 ranks" and block["per rank"] == "1 core"
    file = f"logs/a-b-c-j-{'é' * 42}-42"
    assert {f"--output={file}.out", f"--error={file}.err"} <= set(made_up.srun)
    assert block["logs"] == f"{made_up.cwd}/{file}.out, {Path(file).name}.err"
    assert (made_up.cwd / f"{file}.err").exists()


def test_arguments_reach_the_trainer_as_they_were(made_up):
    arguments = ["--name", "two words", "--runs-dir", "a*b", "", "'"]
    # Of another shell's, which Slurm hands on where nobody gave a count.
    job = {"nodes": PLAIN, "cpus": "4(x2)", "tasks": 2, "SLURM_NTASKS_PER_NODE": "7"}
    made_up.submit("train", *arguments, MPIDDP_PMI="pmi2", **job).expect(0)
    # The job's record says where the checkout is.
    assert made_up.program_line == [PYTHON, "-m", "mpiddp", "train", *arguments]
    assert "SLURM_NTASKS_PER_NODE" not in made_up.exported
    assert "--mpi=pmi2" in made_up.srun and "--mpi=pmix" not in made_up.srun


def test_a_second_start_within_a_job_adds_to_its_logs(made_up):
    # A requeued job, or salloc's shell. What is shown at the end is of the second only.
    first = made_up.submit("train", *TOY, FAKE_STATUS="2", FAKE_RANKS="the first")
    second = made_up.submit("train", *TOY, FAKE_STATUS="2", FAKE_RANKS="it", FAKE_LINES="2")
    written = [f"line {number} of the first" for number in range(1, 31)]
    assert first.stderr.splitlines()[-20:] == written[-20:]
    log = (made_up.cwd / "logs" / "train-42.err").read_text().splitlines()
    assert log == [*written, "line 1 of it", "line 2 of it"]
    assert second.stderr.splitlines()[2:] == ["line 1 of it", "line 2 of it"]


def test_the_file_in_mpiddp_env_is_sourced(made_up):
    # As activation scripts are: with unset variables, with arguments in mind, a false end.
    path = made_up.cwd / "mine.sh"
    path.write_text(
        f'PATH="{Path(sys.executable).parent}:$PATH"\nexport FOUND="$UNSET[$#]"\n[ -n "$UNSET" ]\n'
    )
    made_up.program("mine.sh", "exit 9")
    done = made_up.submit("train", *TOY, MPIDDP_ENV="mine.sh", MPIDDP_PYTHON="").expect(0)
    assert made_up.program_line[0] == "python"
    assert made_up.exported["FOUND"] == "[0]"
    assert lines(done.stdout)["environment"] == "mine.sh"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MPIDDP_ENV", "directory"), ("MPIDDP_ENV", "empty.sh"),
        ("MPIDDP_PYTHON", "no-such-python"), ("MPIDDP_WRAP", "env 'A="), ("logs", "--chdir"),
    ],
)  # fmt: skip
def test_a_variable_that_brings_nothing_is_an_error(made_up, name, value):
    (made_up.cwd / "directory").mkdir()
    (made_up.cwd / "empty.sh").write_text("PATH=/usr/bin:/bin\nalias nothing=true\n")
    (made_up.cwd / "logs").write_text("a file")
    python = {"MPIDDP_PYTHON": "no-such-python"} if name.endswith(("ENV", "PYTHON")) else {}
    line = made_up.read_refusal(made_up.submit("train", *TOY, **{**python, name: value}))
    assert name in line and value in line


def test_the_active_environment_is_used(made_up):
    prefix = made_up.fakes / "some env"
    (prefix / "bin").mkdir(parents=True)
    text = 'case "$*" in *find_spec*) exit 1 ;; *mpi4py*) exit ;; esac\n'
    copies.write_program(prefix / "bin" / "python", f'{text}exec {PYTHON} "$@"', "bash")
    (prefix / "pyvenv.cfg").touch()
    (prefix / "bin" / "activate").write_text('export ACTIVATED="$#"\n')
    done = made_up.submit("train", *TOY, **{**NO_PYTHON, "VIRTUAL_ENV": str(prefix)})
    assert lines(done.expect(0).stdout)["environment"] == str(prefix)
    assert made_up.program_line[0] == "python"
    assert made_up.exported["PATH"].startswith(f"{prefix}/bin:")
    assert made_up.exported["ACTIVATED"] == "0"
    # This Python says that it has torch and mpi4py, but it cannot import mpiddp.
    assert str(launchers.ROOT) in made_up.exported["PYTHONPATH"].split(":")


def copy_jobs(made_up: MadeUp, *links: str) -> None:
    """Make the checkout one of its own, which has no ``.venv``."""
    for name in LINKS - {*links}:
        (made_up.root / name).unlink()
    copies.copy(JOBS, made_up.root / "jobs", ignore=shutil.ignore_patterns("cluster"))
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt"):
        copies.copy(launchers.ROOT / name, made_up.root)


def test_without_an_environment_one_line_says_how_to_get_one(made_up):
    copy_jobs(made_up)
    line = made_up.read_refusal(made_up.submit("train", *TOY, **NO_PYTHON))
    assert "bash jobs/local.sh" in line and "MPIDDP_ENV" in line and str(made_up.root) in line
    # A container brings its own.
    made_up.submit("train", *TOY, MPIDDP_WRAP="env 'A=two words'", **NO_PYTHON).expect(0)
    assert made_up.program_line == ["env", "A=two words", "python", "-m", "mpiddp", "train", *TOY]
    assert str(made_up.root) in made_up.exported["PYTHONPATH"].split(":")


def test_the_outcome_is_found_with_the_python_that_the_prefix_brings(made_up):
    copy_jobs(made_up, "mpiddp", "benchmarks")
    made_up.program("container", f'PATH="{Path(sys.executable).parent}:$PATH"\nexec "$@"\n')
    # The job's own PATH has no Python that could stand in: python is the name of the container's.
    made_up.program("python", "exit 1")
    ended = {"FAKE_OUTCOME": "4", "FAKE_STATUS": "137"}
    made_up.submit("train", *TOY, MPIDDP_WRAP="container", **ended, **NO_PYTHON).expect(4)
    (made_up.cwd / "mine.sh").write_text("export LOADED=1\n")
    variables = {"MPIDDP_PYTHON": "", "MPIDDP_ENV": "mine.sh"}
    made_up.submit("train", *TOY, MPIDDP_WRAP="container", **variables).expect(0)
    assert made_up.program_line == ["container", "python", "-m", "mpiddp", "train", *TOY]


# ---- the exit code ---------------------------------------------------------------------------


def test_the_meanings_are_those_of_the_errors():
    """Those of the table at the head of mpiddp/errors.py."""
    text = " ".join((mpiddp.errors.__doc__ or "").split())
    found = re.findall(r"Error (\d+) (?!\+)(.*?)(?= [├└│]| \w+Error|$)", text)
    table = {0: "done", **{int(code): meaning for code, meaning in reversed(found)}}
    assert set(table) == {0, 1, 2, 3, 4, 5, 6, 75}
    assert {code: describe_code(code) for code in table} == table


KILLED = (
    "srun: Job step aborted: Waiting up to 12 seconds.\\n"
    "srun: error: n1: task 1: Killed\\nsrun: error: n2: tasks 0,2: Terminated\\n"
)
"""What srun says of ranks that failed, as a format of printf."""


def test_the_exit_code_is_the_outcomes_else_that_of_the_rank_that_left(made_up):
    left = made_up.fakes / "state" / "mpiddp" / "jobs" / "42"
    folder = made_up.cwd / "temporary"
    folder.mkdir()
    made_up.program("mktemp", "exit 1")
    for outcome, status, code in (("", "143", 6), ("4", "137", 4)):
        # An earlier outcome is not this job's.
        left.mkdir(parents=True, mode=0o700)
        (left / "outcome.json").write_text(json.dumps({"code": 0, "rank": 0}))
        ended = {"FAKE_OUTCOME": outcome, "FAKE_STATUS": status, "FAKE_MESSAGES": KILLED}
        done = made_up.submit("train", *TOY, TMPDIR=str(folder), **ended).expect(code)
        assert f"ended with exit code {code}: " in done.stderr
        assert f"srun's code was {status}" in done.stderr
        # Nothing is left for the next one either.
        assert not left.exists() and list(folder.iterdir()) == []


@pytest.mark.parametrize(("outcome", "code"), [("", 143), ("4", 4)])
def test_a_signal_is_the_reason_where_no_outcome_says_more(made_up, outcome, code):
    # srun, too, is told by Slurm; what it says of the ranks is no reason.
    made_up.program("srun", f"trap '' TERM\nkill -TERM $PPID; sleep 0.2\n{SRUN}")
    ended = {"FAKE_OUTCOME": outcome, "FAKE_STATUS": "143", "FAKE_MESSAGES": KILLED}
    done = made_up.submit("train", *TOY, **ended).expect(code)
    assert f"mpiddp: job 42 ended with exit code {code}: " in done.stderr
    assert ("mpiddp was sent SIGTERM" in done.stderr) is (outcome == "")


def test_a_signal_before_the_ranks_is_written_down(made_up):
    (made_up.cwd / "mine.sh").write_text("kill -TERM $$\n")
    done = made_up.submit("train", *TOY, MPIDDP_ENV="mine.sh").expect(143)
    assert "no rank had been started" in done.stderr and not made_up.started


# ---- sweep -----------------------------------------------------------------------------------

AXES = ("learning-rate=0.1,0.01,0.001", "batch-size=32,64")


def of_array(task: int = 0, first: int = 0, last: int = 5, **more: str) -> dict[str, Any]:
    """What `submit` is told of a task of an array."""
    numbers = {"ID": task, "MIN": first, "MAX": last, "COUNT": last - first + 1}
    variables = {f"SLURM_ARRAY_TASK_{name}": str(each) for name, each in numbers.items()}
    return {"array": True, "SLURM_ARRAY_JOB_ID": "40", **variables, **more}


def test_each_task_has_its_configuration_and_the_last_axis_varies_fastest(made_up):
    points = itertools.product(["0.1", "0.01", "0.001"], ["32", "64"])
    for task, (rate, batch) in enumerate(points):
        point = ["--learning-rate", rate, "--batch-size", batch]
        found = made_up.front("sweep", *AXES, "--", *TOY, **of_array(task))
        assert found == ["train", *point, *TOY]
    done = made_up.submit("sweep", *AXES, "--", *TOY, **of_array(5)).expect(0)
    assert made_up.program_line[3:] == found
    assert done.stdout.startswith(f"mpiddp: configuration 5 of 0-5: {' '.join(point)}\n")
    assert "--output=logs/sweep-40_5.out" in made_up.srun


@pytest.mark.parametrize(
    ("first", "last", "more"),
    [
        (0, 4, {}),
        (1, 6, {}),
        (0, 5, {"SLURM_ARRAY_TASK_COUNT": "3"}),
        (0, 5, {"SLURM_ARRAY_TASK_ID": ""}),
    ],
)
def test_a_wrong_array_is_told_the_right_one(made_up, first, last, more):
    done = made_up.submit("sweep", *AXES, **of_array(first, first, last, **more))
    line = made_up.read_refusal(done)
    assert "6 configurations" in line and "--array=0-5" in line.split()


def test_variables_of_an_array_that_the_job_is_not_of_are_left_alone(made_up):
    # As in a job that a task of an array has submitted.
    done = made_up.submit("sweep", *AXES, **{**of_array(3), "array": False})
    assert "a sweep is a job array" in made_up.read_refusal(done)
    inherited = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}
    made_up.submit("train", *TOY, **inherited)
    assert "--output=logs/train-42.out" in made_up.srun
    assert inherited.keys().isdisjoint(made_up.exported)


def test_a_grid_that_cannot_be_meant_is_refused(made_up):
    for arguments, part in (
        ([], "no axis"),
        (["--", "--epochs", "1"], "no axis"),
        (["epochs"], "'epochs'"),
        (["--epochs", "1"], "'--epochs'"),
        (["epochs="], "'epochs='"),
        (["epochs=1,,2"], "'epochs=1,,2'"),
        (["epochs=1,"], "'epochs=1,'"),
        (["batch-size=1", "batch_size=2"], "twice"),
        (["batch_size=1,2", "--", "--batch-size=3"], "--batch-size is an axis"),
        (["epochs=1,2", "--", "--name", "x"], "--name"),
    ):
        done = made_up.submit("sweep", *arguments, **of_array())
        assert part in made_up.read_refusal(done), arguments


# ---- what the front is told ------------------------------------------------------------------


def test_job_scripts_know_the_options_of_the_front(made_up):
    valued, single = bash('echo "${VALUED[*]}"; echo "${SINGLE[*]}"').splitlines()
    known = {**dict.fromkeys(valued.split(), True), **dict.fromkeys(single.split(), False)}
    assert known == command_line.FRONT
    line = made_up.read_refusal(made_up.submit("train", "--restarts"))
    assert line == "mpiddp: --restarts expects a value"


@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("train", "--restarts 1 --epochs 1", "--restarts 1 train --epochs 1"),
        ("train", "--restarts=1 --min_nodes 1 -x", "--restarts=1 --min_nodes 1 train -x"),
        ("run", "--restarts 1 x.py --its own", "--restarts 1 x.py --its own"),
        ("sweep", "--requeue lr=1,2 -- --epochs 1", "--requeue train --lr 1 --epochs 1"),
        ("sweep", "lr=1,2 -- --restarts 1 x.py --a", "--restarts 1 x.py --lr 1 --a"),
        ("sweep", "--n=x lr=a=b,/*:2 -- -m pack.mod --a", "-m pack.mod --n x --lr a=b --a"),
    ],
)
def test_every_job_script_takes_options_of_the_front_first(made_up, script, words, expected):
    job = of_array(last=1) if script == "sweep" else {}
    assert made_up.front(script, *words.split(), **job) == expected.split()


def test_a_script_of_anybodys_is_started(made_up):
    (made_up.cwd / "x y.py").touch()
    words = ["--ranks-per-node", "2", "--restarts", "1", "x y.py", "--its own", "a*"]
    done = made_up.submit("run", *words, nodes=PLAIN, cpus="4(x2)", FAKE_STATUS="1").expect(1)
    assert made_up.program_line == [PYTHON, "-m", "mpiddp", "x y.py", "--its own", "a*"]
    assert made_up.options == ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    assert "restart 1 of 1" in done.stderr
    # What both attempts said is kept.
    assert len((made_up.cwd / "logs" / "run-42.err").read_text().splitlines()) == 2 * 30
    # In a container may be what is not there.
    made_up.submit("run", "gone.py", MPIDDP_WRAP="container").expect(0)


def test_scripts_that_were_written_use_the_python_that_wrote_them(made_up):
    # What ``mpiddp jobs`` writes, in a directory with a name of its own.
    (made_up.root / "slurm").mkdir()
    for path in scripts.SCRIPTS.glob("*.s*h"):
        copies.copy(path, made_up.root / "slurm")
    (made_up.root / "slurm" / scripts.PYTHON).write_text(f"{PYTHON}\n")
    variables = {**NO_PYTHON, "command": f"{made_up.root}/slurm/train.sbatch"}
    made_up.submit("train", *TOY, **variables).expect(0)
    assert made_up.program_line == [PYTHON, "-m", "mpiddp", "train", *TOY]
    assert str(made_up.root) not in made_up.exported.get("PYTHONPATH", "")
    # Also where the ranks' Python is in a container, which is to have mpiddp itself.
    done = made_up.submit("train", *TOY, MPIDDP_WRAP="env", **variables)
    assert made_up.program_line == ["env", "python", "-m", "mpiddp", "train", *TOY], done.stderr
    (made_up.root / "slurm" / scripts.PYTHON).write_text("/gone/bin/python\n")
    said = made_up.submit("train", *TOY, **variables).expect(2).stderr
    assert "/gone/bin/python" in said and "mpiddp jobs" in said


# ---- chain -----------------------------------------------------------------------------------


def chain(made_up: MadeUp, *stages: str, **variables: str):
    return made_up.run(JOBS / "chain.sh", *stages, **variables)


def submitted(made_up: MadeUp) -> list[list[str]]:
    paths = sorted(made_up.fakes.glob("sbatch.*"))
    return [path.read_text().split("\0")[:-1] for path in paths]


def test_each_stage_depends_on_the_one_before(made_up):
    script = made_up.cwd / "my script.sh"
    script.touch()
    done = chain(made_up, f"-N 2 {TRAIN} --name 'a b'", "'my script.sh'", '--wrap "a b"')
    assert (done.returncode, done.stderr) == (0, "")
    both = ["--parsable", "--kill-on-invalid-dep=yes"]
    assert submitted(made_up) == [
        [*both, "-N", "2", f"{JOBS}/train.sbatch", "--name", "a b"],
        [*both, "--dependency=afterok:41", "my script.sh"],
        [*both, "--dependency=afterok:42", "--wrap", "a b"],
    ]
    rows = [row.split(maxsplit=3)[:3] for row in done.stdout.splitlines()[1:4]]
    assert rows == [["1", "41", "-"], ["2", "42", "41"], ["3", "43", "42"]]
    assert done.stdout.splitlines()[-1].endswith("scancel 41 42 43")


def test_a_stage_that_is_refused_takes_the_earlier_ones_with_it(made_up):
    done = chain(made_up, "--wrap a", "--wrap b", "--refuse --wrap c", "--wrap d").expect(2)
    assert len(submitted(made_up)) == 3
    assert (made_up.fakes / "scancelled").read_text() == "41 42\n"
    assert "stage 3 could not be submitted" in done.stderr and "41 42" in done.stderr


def test_a_chain_that_cannot_be_meant_submits_nothing(made_up):
    (made_up.cwd / "here").touch()
    for stages, part in (
        ([], "no stage"),
        (["--wrap a", "--nodes=2 --epochs 1"], "stage 2 names no script"),
        (["--wrap a", "jobs/gone.sbatch"], "stage 2 names no script"),
        (["--wrap a", "--dependency=singleton --wrap b"], "stage 2 has a dependency"),
        (["--wrap a", "-o here -d singleton here"], "stage 2 has a dependency"),
        (["--wrap a", "-HQd singleton here"], "stage 2 has a dependency"),
        (["--wrap a", "--dep singleton here"], "stage 2 has a dependency"),
        (["--wrap a", "--hold --depend=singleton -- here"], "stage 2 has a dependency"),
        (["--wrap a", "-N 1 : --dependency=singleton here"], "stage 2 has a dependency"),
        (["--wrap a", "--hold gone here"], "stage 2 names no script"),
        (["--wrap a", "--wrap 'b"], "quote"),
        (["--wrap a", "--wrap b\\"], "backslash"),
    ):
        assert part in made_up.read_refusal(chain(made_up, *stages)), stages
    assert submitted(made_up) == []


def test_words_behind_the_script_and_values_are_no_dependency(made_up):
    (made_up.cwd / "here").touch()
    stages = [
        "here --dependency=x -d y", "-o here here -d x", "-- here -d x",
        "-HQ -N2 --excl --hold here -d x", "--deadline=now+1hour -Dd here -d x",
        '--wrap="echo \\"hi\\" -d"', "--hold --wra here -J name",
    ]  # fmt: skip
    done = chain(made_up, "-d singleton here", *stages)
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = submitted(made_up)
    assert first[2:] == ["-d", "singleton", "here"]
    assert [words[3:] for words in others] == [shlex.split(stage) for stage in stages]


# ---- benchmark -------------------------------------------------------------------------------


START = f'case "$*" in "-m mpiddp "*) exec {shlex.quote(PYTHON)} "$@" ;; esac\n'
"""Makes a Python that does something else than to start the benchmark start it nevertheless."""


def test_what_a_benchmark_says_goes_to_the_logs(made_up):
    done = made_up.submit("benchmark", "nonsense").expect(2)
    assert "exit code 2: bad arguments" in done.stderr
    assert "'nonsense' is not a benchmark" in done.stderr
    assert "nonsense" in (made_up.cwd / "logs" / "benchmark-42.err").read_text()
    # A prefix could not reach the ranks.
    done = made_up.submit("benchmark", "startup", MPIDDP_WRAP="nice").expect(2)
    assert "MPIDDP_WRAP" in done.stderr


def test_the_steps_of_a_benchmark_have_the_cores_that_were_asked_for(made_up):
    made_up.program("show", START + 'echo "cores: ${SRUN_CPUS_PER_TASK-}"\n')
    show = str(made_up.bin / "show")
    for variables in ({"SLURM_CPUS_PER_TASK": "3"}, {}):
        made_up.submit("benchmark", "x", MPIDDP_PYTHON=show, **variables).expect(0)
    # The second start within the job has added to the log.
    written = (made_up.cwd / "logs" / "benchmark-42.out").read_text()
    assert written == "cores: 3\ncores: \n"


HEAR = """trap 'echo heard >>heard' {0}
kill -{0} {2}
{1}for _ in {{1..600}}; do [ -e heard ] || sleep 0.1; done
exit 9
"""
"""A program that has the script above it told, and writes down what it hears itself."""


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_signal_for_the_script_alone_is_handed_to_the_benchmark_once(made_up, state):
    # In a job that it ends, Slurm itself tells the benchmark.
    own = "" if state == "RUNNING" else "sleep 1; kill -TERM $$\n"
    text = HEAR.format("TERM", own, "$PPID")
    made_up.program(
        "slow", f'{START}case "$*" in "-m mpiddp.checkout.bench x") ;; *) exit ;; esac\n{text}'
    )
    variables = {"MPIDDP_PYTHON": str(made_up.bin / "slow"), "FAKE_STATE": state}
    done = made_up.submit("benchmark", "x", **variables).expect(9)
    assert "mpiddp was sent SIGTERM" in done.stderr
    assert (made_up.cwd / "heard").read_text() == "heard\n"


# ---- stage -----------------------------------------------------------------------------------

STEP = 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n'


def pack(folder: Path) -> Path:
    """An archive of an environment with one program, ``tool``; everybody may write to its files."""
    (folder / "env" / "bin").mkdir(parents=True)
    tool = folder / "env" / "bin" / "tool"
    tool.write_text("#!/bin/sh\necho it runs on $(uname -n)\n")
    for path in (tool, folder / "env"):
        path.chmod(0o777)
    archive = folder / "env.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", folder / "env", "."], check=True, timeout=60)
    return archive


@pytest.fixture
def stage(made_up):
    """Runs a command on a node with a directory into which an environment is to be staged."""
    made_up.program("srun", STEP)
    made_up.program("sbcast", 'cp -- "$2" "$3"\n')
    folder = made_up.cwd / "own"
    folder.mkdir()
    folder.chmod(0o1777)

    def run(*command: str):
        words = [str(pack(made_up.fakes)), str(folder), *command]
        return made_up.run(JOBS / "stage.sh", *words, SLURM_JOB_ID="42", SLURM_NNODES="1")

    return run


@pytest.mark.parametrize(
    ("name", "state", "steps"), [("TERM", "RUNNING", 3), ("TERM", "COMPLETING", 2), ("INT", "", 3)]
)
def test_a_signal_reaches_the_command_and_every_node_is_cleared(stage, made_up, name, state, steps):
    made_up.program("srun", f'echo step >>"$FAKES/steps"\n{STEP}')
    made_up.variables["FAKE_STATE"] = state
    # Ctrl-C comes from the terminal, to all of its processes; so does the end of a job of Slurm's.
    own = "" if state == "RUNNING" else f"sleep 1; kill -{name} $$\n"
    hear = HEAR.format(name, own, "$(cut -d' ' -f4 /proc/$PPID/stat)")
    look = 'tool; echo "$MPIDDP_ENV"; cd "${MPIDDP_ENV%/*}"; stat -c %a .; ls; cd "$OLDPWD"; '
    look += 'PATH=/usr/bin:/bin; . "$MPIDDP_ENV"; tool'
    done = stage("bash", "-c", f"{look}\n{hear}")
    tool, file, mode, *left, sourced = done.expect(9).stdout.splitlines()
    assert tool == sourced == f"it runs on {os.uname().nodename}"
    assert re.fullmatch(rf"{made_up.cwd}/own/mpiddp-env-42-[0-9a-f]{{16}}/env.sh", file)
    assert mode == "700" and left == ["env", "env.sh"]
    assert (made_up.cwd / "heard").read_text() == "heard\n"
    # One to make the place, one to unpack, one to take it away, which an ending job cannot start.
    assert (made_up.fakes / "steps").read_text().count("step") == steps
    assert list((made_up.cwd / "own").iterdir()) == []


@pytest.mark.parametrize(
    ("program", "text", "mode", "part"),
    [
        ("od", "echo 00", 0o1777, "cannot be made: is "),
        ("sbcast", 'mv "${3%/*}" "$FAKES/gone"; mkdir "${3%/*}"; cp "$2" "$3"\n', 0o1777,
         "is not what this job has made"),
        ("unused", "", 0o777, "others can rename what you make there"),
    ],
)  # fmt: skip
def test_a_place_that_is_not_this_jobs_alone_is_not_used(stage, made_up, program, text, mode, part):
    made_up.program(program, text)
    (made_up.cwd / "own").chmod(mode)
    if program == "od":
        (made_up.cwd / "own/mpiddp-env-42-00").mkdir(mode=0o700)
    done = stage("tool")
    assert (done.returncode, done.stdout) == (2, "") and part in done.stderr, done
    assert program != "unused" or list((made_up.cwd / "own").iterdir()) == []


def test_what_cannot_be_staged_is_refused(made_up):
    (made_up.cwd / "archive").touch()
    for words, part in (
        ([], "found 0 words"),
        (["none.tar", "/tmp", "true"], "no archive none.tar"),
        (["/tmp", "/tmp", "true"], "no archive /tmp"),
        (["archive", "tmp", "true"], "full path"),
    ):
        done = made_up.run(JOBS / "stage.sh", *words, SLURM_JOB_ID="42", SLURM_NNODES="1")
        assert part in made_up.read_refusal(done)


# ---- a real cluster --------------------------------------------------------------------------


class Ended:
    """A job that has ended: its state, exit code and what its script wrote."""

    def __init__(self, record: str, directory: Path) -> None:
        def find(name: str) -> str:
            return re.findall(rf"\b{name}=([^\s:]*)", record)[0]

        array = re.search(r"ArrayJobId=(\d+) ArrayTaskId=(\d+)", record)
        self.identity = "_".join(array.groups()) if array else find("JobId")
        self.state, self.code = find("JobState"), int(find("ExitCode"))
        self.directory = directory
        path = Path(re.findall(r"StdOut=(.*)", record)[0])
        self.output = path.read_text() if path.exists() else ""

    def log(self, kind: str) -> str:
        """What the ranks wrote; kind is out or err."""
        [path] = (self.directory / "logs").glob(f"*-{self.identity}.{kind}")
        return path.read_text()


@dataclass(frozen=True)
class Submitter:
    """Submits from a directory of its own, to a cluster that has nothing else to do."""

    cluster: Cluster
    directory: Path

    def command(self, *command: str, **variables: str):
        env = self.cluster.job_environment(**variables)
        return launchers.execute(*command, env=env, cwd=self.directory, timeout=JOB_SECONDS)

    def submit(self, *arguments: str, **variables: str) -> str:
        done = self.command("sbatch", "--parsable", *arguments, **variables)
        return done.expect(0).stdout.strip()

    def wait(self, identity: str) -> list[Ended]:
        """The jobs behind an id, when all have ended; those of an array by their tasks."""
        launchers.until(
            lambda: all(map(FINISHED.search, self.cluster.records(identity))),
            f"the end of job {identity}", JOB_SECONDS, pause=0.1,
        )  # fmt: skip
        ended = [Ended(each, self.directory) for each in self.cluster.records(identity)]
        return sorted(ended, key=lambda job: job.identity)

    def run(self, *arguments: str, **variables: str) -> Ended:
        [job] = self.wait(self.submit(*arguments, **variables))
        return job


@pytest.fixture
def slurm(slurm_cluster, tmp_path) -> Submitter:
    directory = tmp_path / "elsewhere and away"
    directory.mkdir()
    return Submitter(slurm_cluster, directory)


def test_a_checkout_with_a_space_trains_from_elsewhere_on_uneven_gpus(slurm, tmp_path):
    root = tmp_path / "check out"
    root.mkdir()
    for name in ("jobs", "mpiddp"):
        (root / name).symlink_to(launchers.ROOT / name)
    job = slurm.run(
        "--nodes=2", "--gpus=3", "--job-name=a b/c%j", f"{root}/jobs/train.sbatch", *TOY
    )
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert lines(job.output)["ranks"] in ("2 nodes, 2+1 = 3 ranks", "2 nodes, 1+2 = 3 ranks")
    assert "1 node x 2 ranks + 1 node x 1 rank = 3 ranks" in job.log("out")
    assert "3 ranks on 2 nodes" in job.log("err")
    assert (slurm.directory / "logs" / f"a-b-c-j-{job.identity}.out").exists()
    assert f"runs/a b-c%j-{job.identity}/outcome.json" in job.output


SEEN = """
import os
print(os.environ["SLURM_PROCID"], os.environ["SLURM_NODEID"], os.environ["CUDA_VISIBLE_DEVICES"],
      os.environ["SLURM_CPUS_PER_TASK"], os.environ.get("RANK"), flush=True)
"""


def test_every_rank_sees_all_gpus_of_its_node_and_has_its_cores(slurm, tmp_path):
    # Without the submitting shell's variables: srun must hand on what the script has set.
    started = wrap(tmp_path, f"exec {shlex.join([sys.executable, '-c', SEEN])}\n")["MPIDDP_WRAP"]
    exported = f"--export=MPIDDP_PYTHON={sys.executable},MPIDDP_WRAP={started}"
    options = ("--nodes=2", "--gpus-per-node=2", "--cpus-per-gpu=2", exported)
    job = slurm.run(*options, f"{JOBS}/train.sbatch", *TOY)
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    seen = sorted(line.split() for line in job.log("out").splitlines())
    assert seen == [[str(rank), str(rank // 2), "0,1", "2", "None"] for rank in range(4)]


@pytest.mark.long
def test_an_array_of_the_right_size_starts_each_configuration_again_if_preempted(slurm, tmp_path):
    # The ranks only print what they would have been.
    text = "seen=seen-$SLURM_ARRAY_TASK_ID\n"
    text += 'echo $SLURM_RESTART_COUNT "$@"\n[ -e $seen ] || { touch $seen; exit 75; }\n'
    axes = ("learning-rate=0.5,0.25", "batch-size=8")
    words = ("--array=0-1%1", "--nodes=1", f"{JOBS}/sweep.sbatch", *axes, "--", *TOY)
    identity = slurm.submit(*words, **wrap(tmp_path, text))
    # Between its two runs a task has ended, for a moment.
    again = re.compile(r"Restarts=1 .*\n(.*\n)*.*RunTime=00:0")
    launchers.until(lambda: all(map(again.search, slurm.cluster.records(identity))), "second runs")
    jobs = slurm.wait(identity)
    for task, (job, rate) in enumerate(zip(jobs, ("0.5", "0.25"), strict=True)):
        assert (job.state, job.code) == ("COMPLETED", 0), job.output
        point = f"--learning-rate {rate} --batch-size 8 {' '.join(TOY)}"
        first, second = job.log("out").splitlines()
        assert second == f"1 {first}"
        assert launchers.read_words(first.split())[1:] == f"-m mpiddp train {point}".split()
        # Slurm's own file has both runs as well.
        assert "ended with exit code 75: preempted" in job.output
        assert f"mpiddp: job {identity}_{task} ended with exit code 0: done" in job.output


def test_a_chain_ends_where_a_stage_fails(slurm):
    stages = ["--wrap 'echo one >>order'", "--array=0-1 --wrap 'echo two >>order'"]
    stages += ["--wrap 'exit 2'", "--wrap true", "--wrap true"]
    done = slurm.command("bash", f"{JOBS}/chain.sh", *stages).expect(0)
    identities = [row.split()[1] for row in done.stdout.splitlines()[1:6]]
    jobs = [job for identity in identities for job in slurm.wait(identity)]
    assert (slurm.directory / "order").read_text().split() == ["one", "two", "two"]
    states = [*["COMPLETED"] * 3, "FAILED", "CANCELLED", "CANCELLED"]
    assert [job.state for job in jobs] == states and jobs[3].code == 2


TOLD = """
import os, pathlib, signal, sys, time
said = pathlib.Path(f"said-{os.environ['SLURM_PROCID']}")

def leave(number, _):
    # The first one counts: the end of another rank brings SIGTERM.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    # As long as a rank may take to write down why.
    time.sleep(0.3)
    said.write_text(str(number))
    # Who ends first has Slurm end the other one.
    while not all(path.read_text() for path in pathlib.Path().glob("said-*")):
        time.sleep(0.01)
    os._exit(128 + number)

signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
said.touch()
time.sleep(300)
"""


def wrap(tmp_path: Path, text: str) -> dict[str, str]:
    """Ranks that are a few lines of shell, in place of Python."""
    path = copies.write_program(tmp_path / "ranks", text)
    return {"MPIDDP_WRAP": str(path), "MPIDDP_PMI": "none"}


def wrap_told(tmp_path: Path) -> dict[str, str]:
    """Ranks that tell which signal came."""
    return wrap(tmp_path, f"exec {shlex.join([sys.executable, '-S', '-c', TOLD])}\n")


SHAPED = "tbf rate 40mbit burst 80kb latency 50ms"
"""A twentieth of what the slowest link carries beside busy programs."""


def await_files(folder: Path, pattern: str, count: int) -> None:
    launchers.until(lambda: len(list(folder.glob(pattern))) >= count, f"{count} {pattern}")


@pytest.mark.parametrize(
    "ending",
    [pytest.param(["scancel"], marks=pytest.mark.long), ["scancel", "--batch", "--signal=TERM"]],
    ids=["scancel", "for the script alone"],
)
def test_a_job_that_slurm_ends_lets_its_ranks_speak_and_says_how_it_ended(slurm, tmp_path, ending):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = {**wrap_told(tmp_path), "TMPDIR": str(temporary)}
    identity = slurm.submit("--nodes=2", f"{JOBS}/train.sbatch", *TOY, **variables)
    await_files(slurm.directory, "said-*", 2)
    slurm.cluster.ask(*ending, identity)
    [job] = slurm.wait(identity)
    # It is not requeued.
    assert job.state == ("CANCELLED" if len(ending) == 1 else "FAILED")
    # A job that is cancelled has ended for Slurm before its script has.
    said = f"job {identity} ended with exit code 143: signal 15 (SIGTERM)"
    launchers.until(lambda: said in slurm.wait(identity)[0].output, said, pause=0.1)
    said = [path.read_text() for path in sorted(slurm.directory.glob("said-*"))]
    assert said == [str(int(signal.SIGTERM))] * 2
    assert list(temporary.iterdir()) == []


def test_an_environment_is_staged_on_each_node_and_taken_away(slurm, tmp_path):
    archive = shlex.quote(str(pack(tmp_path)))
    start = f"bash {shlex.quote(str(JOBS / 'stage.sh'))} {archive}"
    # A node's own; /tmp is the same on all of them here.
    line = f"{start} /dev/shm srun --mpi=none -n2 tool && ! {start} /tmp true"
    job = slurm.run("--nodes=2", "--wrap", line)
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert {"it runs on node1", "it runs on node2"} <= set(job.output.splitlines())
    assert "is /tmp local to each node?" in job.output
    for node in ("node1", "node2"):
        assert f"mpiddp-env-{job.identity}-" not in slurm.cluster.must(
            "exec", node, "ls", "/dev/shm", "/tmp"
        )


def test_ctrl_c_in_an_allocation_goes_to_the_ranks(slurm, tmp_path):
    environment = launchers.clean_environment(slurm.cluster.job_environment(**wrap_told(tmp_path)))
    terminal, end = pty.openpty()
    command = ["salloc", "--nodes=2", "-n2", "bash", f"{JOBS}/train.sbatch", *TOY]
    # The terminal's foreground processes, who get what is typed.
    line = ["setsid", "--ctty", "--wait", *command]
    process = subprocess.Popen(
        line, env=environment, cwd=slurm.directory, stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    printed = b""
    try:
        await_files(slurm.directory, "said-*", 2)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):
            while piece := os.read(terminal, 4096):
                printed += piece
        assert process.wait(JOB_SECONDS) == 130, printed
    finally:
        process.kill()
        os.close(terminal)
    assert b"ended with exit code 130: signal 2 (SIGINT)" in printed
    assert (slurm.directory / "said-0").read_text() == str(int(signal.SIGINT))


SOME_OPTIONS = {
    "--exclusive", "--hold", "-H", "--nice", "--no-kill", "--container", "--nodes", "-N",
}  # fmt: skip


@pytest.mark.parametrize("all_options", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_chain_knows_which_of_sbatchs_options_take_the_next_word(slurm, made_up, all_options):
    (made_up.cwd / "here").touch()
    names = set(SOME_OPTIONS)
    if all_options:
        text = slurm.command("sbatch", "--help").stdout
        names = set(re.findall(r"(?<!\S)--?[a-zA-Z][a-zA-Z0-9-]*", text))
        assert names > SOME_OPTIONS
    # With nothing behind it, and no script: sbatch says what it misses first.
    said = {name: slurm.command("sbatch", name).stderr for name in sorted(names - {"--wrap"})}
    valued = [name for name, text in said.items() if "requires an argument" in text]
    flags = [name for name in said if name not in valued]
    done = chain(made_up, *(f"{name} here" for name in flags))
    assert (done.returncode, done.stderr) == (0, "")
    done = chain(made_up, " ".join(f"{name} here" for name in valued))
    assert "names no script" in done.stderr
    done = chain(made_up, " ".join(f"{name} gone" for name in valued) + " here")
    assert (done.returncode, done.stderr) == (0, "")


def test_nodes_that_fail_the_preflight_or_later_are_replaced(slurm, tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(
        "import os\nhost = os.uname().nodename\nprint(host, flush=True)\n"
        "if host == 'node2':\n    raise RuntimeError('CUDA error: uncorrectable ECC error')\n"
    )
    words = (f"{JOBS}/run.sbatch", "--nodes", "2", "--preflight", "--restarts", "1", str(script))
    shape = "tc qdisc {} dev ens1f0 root"
    slurm.cluster.must("exec", "node3", *shape.format("add").split(), *SHAPED.split())
    try:
        job = slurm.run("--nodes=4", "--ntasks-per-node=1", *words)
    finally:
        slurm.cluster.must("exec", "node3", *shape.format("delete").split())
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert "node3 fails the preflight: links: TCP: node3 → node4" in job.output
    assert "3 of 4 nodes passed the preflight" in job.output
    assert "spares       node[3-4]\n" in job.output
    assert "restart 1 of 1, without node[2-3]\n" in job.output
    assert "this looks like a fault of node2, not of the script" in job.log("err")
    # The spare one takes its place.
    assert sorted(job.log("out").split())[-3:] == ["node1", "node2", "node4"]
