"""Ranks on hosts that the user or a scheduler names, over SSH."""

import contextlib
import importlib.metadata
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import doctors
import launchers
import slurm
import ssh
from copies import write_program
from mpiddp import environment
from mpiddp.doctor.examiner.doctor_options import DoctorOptions
from mpiddp.errors import ConfigurationError
from mpiddp.front import launch_plan
from mpiddp.front.hosts import agents, reachability, schedulers
from mpiddp.front.hosts.reachability import Answers, Question
from mpiddp.launch.launcher.exported_variables import forget_launch
from mpiddp.launch.launcher.host_list import join, read_hosts, read_lines
from mpiddp.launch.launcher.programs import MPICH, OPEN_MPI, OPEN_MPI_4
from mpiddp.launch.script.command_line import FRONT, split
from mpiddp.launch.script.front_options import FrontOptions
from mpiddp.options.fields import list_fields
from mpiddp.process import cpus

FORMS = {
    "a slots=4 max_slots=8": {"a": 4},
    "a slots=0\nb": {"b": None},
    "a:2\na\nb # not c\n\n# d": {"a": 3, "b": None},
    "node[1-3]:2": {"node1": 2, "node2": 2, "node3": 2},
    "a:2\r\nb\r\n": {"a": 2, "b": None},
    "r1 4 all.q@r1 UNDEFINED\nr2 2 all.q@r2 <NULL>": {"r1": 4, "r2": 2},
    "10.0.0.1 slots=2": {"10.0.0.1": 2},
}


@pytest.mark.parametrize("text", FORMS, ids=repr)
def test_every_form_of_a_host_file_is_read(text):
    assert {host.name: host.slots for host in join(read_lines(text))} == FORMS[text]


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "a:0", "me@a:4", "[fd00::1]:4", "fd00::1", "a:x", "-oProxyCommand=x", "a b", "a;b",
     "a[1-9999999999999]", "a[1-60000][1-60000]"],
)  # fmt: skip
def test_what_is_no_host_is_refused(text):
    with pytest.raises(ValueError, match="expected "):
        read_hosts(text)


@pytest.mark.parametrize("text", ["", "# a", "a\n-x", "a b=2", "a:1:2", "fd00::1 slots=2"])
def test_a_host_file_without_sense_is_refused(text):
    with pytest.raises(ValueError, match=r"line|names no host"):
        read_lines(text)


GIVEN = {
    "PBS_NODEFILE": ("a\na\nb\n", {"a": 2, "b": 1}),
    "LSB_DJOB_HOSTFILE": ("a\nb\nb\n", {"a": 1, "b": 2}),
    "LSB_MCPU_HOSTS": ("a 4 b 2", {"a": 4, "b": 2}),
    "PE_HOSTFILE": ("a 4 all.q@a UNDEFINED\n", {"a": 4}),
    "COBALT_NODEFILE": ("a\nb\n", {"a": 1, "b": 1}),
    "OAR_NODEFILE": ("a\na\n", {"a": 2}),
    "OMPI_MCA_orte_default_hostfile": ("job-worker-0.job.ns.svc slots=2\n",
                                       {"job-worker-0.job.ns.svc": 2}),
    "I_MPI_HYDRA_HOST_FILE": ("job-worker-0.job.ns.svc:2\n", {"job-worker-0.job.ns.svc": 2}),
    "HYDRA_HOST_FILE": ("a:1\nb:1\n", {"a": 1, "b": 1}),
}  # fmt: skip


@pytest.mark.parametrize("variable", GIVEN)
def test_what_a_scheduler_gives_is_found(variable, tmp_path):
    content, expected = GIVEN[variable]
    value = content
    if not variable.endswith("MCPU_HOSTS"):
        (tmp_path / "hosts").write_text(content)
        value = str(tmp_path / "hosts")
    found = schedulers.find_hosts({variable: value})
    assert found is not None and {host.name: host.slots for host in found.hosts} == expected
    assert schedulers.find_hosts({variable: ""}) is None
    with pytest.raises(ConfigurationError, match=variable):
        schedulers.find_hosts({variable: "no/such/file"})
    assert {source.variable for source in schedulers.SOURCES} == {*environment.HOST_LISTS}


@pytest.mark.parametrize("variable", ["OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE"])
def test_a_setting_without_hosts_is_no_job(variable, tmp_path):
    (tmp_path / "hosts").write_text("# as Open MPI is installed\n")
    assert schedulers.find_hosts({variable: str(tmp_path / "hosts")}) is None
    assert schedulers.find_hosts({variable: "none"}) is None


OWN = os.uname().nodename
CORES = cpus.count_cores()
AS_BEFORE = {
    "--hosts, a rank per core": (OWN, {"hosts": read_hosts("localhost")}, CORES),
    "PBS, more ranks than lines": (OWN, {"ranks": 4}, 4),
    "an address": ("127.0.0.1 slots=3", {"nodes": 1}, 3), "two names": (f"localhost\n{OWN}", {}, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", AS_BEFORE)
def test_this_machine_alone_needs_other_ssh(case, tmp_path, monkeypatch):
    text, asked, ranks = AS_BEFORE[case]
    (tmp_path / "hosts").write_text(text)
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "hosts"))
    monkeypatch.setattr(launch_plan, "ask_hosts", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    plan = launch_plan.make_plan(FrontOptions(**asked), question=Question(()))
    assert (plan.ranks, plan.layout, plan.is_over_ssh) == (ranks, None, False)


PLANS = {
    "a:3,b:1": ({}, "a:3,b:1"), "a:4,b:4,c:4": ({"nodes": 2}, "a:4,b:4"),
    "a:8,b:2": ({"ranks": 10, "without": ["a"]}, "b:2"),
    "a:2,b:2,c:2": ({"without": [], "silent": ["b"]}, "a:2,c:2"),
    "a:1,b:1,c:1": ({"nodes": 2, "preflight": True, "silent": ["b"]}, "a:1,c:1"),
    "PBS": ({"ranks": 4}, "a:2,b:2"), "a,b": ({"ranks": 6, "dry_run": True}, "a:3,b:3"),
}  # fmt: skip


@pytest.mark.parametrize("hosts", PLANS)
def test_ranks_are_divided_among_hosts(hosts, tmp_path, monkeypatch):
    asked, places = PLANS[hosts]
    silent = asked.get("silent", ())
    answers = Answers({name: {"cores": 8} for name in "abc"}, dict.fromkeys(silent, ("silent",)))
    monkeypatch.setattr(launch_plan, "is_own", lambda name: False)
    monkeypatch.setattr(launch_plan, "ask_hosts", lambda *_: answers)
    (tmp_path / "hosts").write_text("a\nb\n")
    if hosts == "PBS":
        monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "hosts"))
    more = {} if hosts == "PBS" else {"hosts": read_hosts(hosts)}
    without = asked.get("without")
    options = {name: each for name, each in asked.items() if name not in ("without", "silent")}
    plan = launch_plan.make_plan(FrontOptions(**options, **more), without, Question(()))
    assert places in plan.words and plan.is_over_ssh
    assert "OMPI_MCA_orte_default_hostfile" in plan.unset


def test_variables_are_named_for_an_mpirun_that_passes_none_on_over_ssh_and_for_no_other():
    name = environment.JOB_DIRECTORY
    rows = ((OPEN_MPI, True, ["-x", name]), (OPEN_MPI, False, []), (MPICH, True, []))
    for kind, is_over_ssh, added in rows:
        plan = launch_plan.LaunchPlan(kind, ("mpirun", "-n", "2"), is_over_ssh=is_over_ssh)
        assert plan.make_words({name: "x", "HOME": "y"}) == ["mpirun", *added, "-n", "2"]


def test_a_slip_in_the_number_of_ranks_is_refused(monkeypatch):
    answers = Answers({name: {"cores": 2} for name in "ab"}, {})
    monkeypatch.setattr(launch_plan, "ask_hosts", lambda *_: answers)
    with pytest.raises(ConfigurationError, match="2 cores, so give it at most 128"):
        launch_plan.make_plan(FrontOptions(hosts=read_hosts("a:129,b:1")), question=Question(()))
    with pytest.raises(ConfigurationError, match="give more with HOST:N in --hosts"):
        launch_plan.make_plan(FrontOptions(hosts=read_hosts("a:2"), ranks=3), question=Question(()))


@pytest.mark.parametrize(
    ("launcher", "job", "reason"),
    [
        ("auto", "7", "a Slurm job's"),
        ("srun", "", "a Slurm job's"),
        ("none", "", "--launcher none"),
    ],
)
def test_hosts_are_refused_where_others_choose_them(launcher, job, reason, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    with pytest.raises(
        ConfigurationError, match=f"--hosts names machines for mpirun, but .*{reason}"
    ):
        launch_plan.find_hosts(FrontOptions(hosts=read_hosts("a"), launcher=launcher))


def test_a_list_that_cannot_be_read_stops_only_who_needs_it(monkeypatch):
    monkeypatch.setenv("PBS_NODEFILE", "no/such/file")
    plan = launch_plan.make_plan(FrontOptions(ranks=2), question=Question(()))
    assert plan.ranks == 2 and "no/such/file cannot be read" in plan.note
    for asked in ({}, {"ranks": 2, "nodes": 1}):
        with pytest.raises(ConfigurationError, match="-n N alone starts N ranks on this machine"):
            launch_plan.make_plan(FrontOptions(**asked), question=Question(()))


def test_in_a_flux_job_its_own_command_is_named(monkeypatch):
    monkeypatch.setenv("FLUX_URI", "local:///run/flux/local")
    plan = launch_plan.make_plan(FrontOptions(ranks=8))
    assert "flux run -N NODES -n 8 python -m mpiddp" in plan.note
    with pytest.raises(ConfigurationError, match=r"--nodes: .* flux run -N NODES -n RANKS"):
        launch_plan.make_plan(FrontOptions(nodes=2))


def test_the_doctor_has_the_fronts_options_behind_it():
    line = split(["doctor", "--hosts", "a,b", "--output=x.json", "-n4"])
    assert line.front == (("--hosts", "a,b"), ("-n", "4"))
    assert line.rest == ("doctor", "--output=x.json")
    assert FRONT.keys().isdisjoint(field.flag for field in list_fields(DoctorOptions))
    assert split(["script.py", "--hosts", "a"]).rest == ("script.py", "--hosts", "a")


def test_ranks_do_not_start_ranks_on_the_hosts_of_their_job(monkeypatch):
    monkeypatch.setenv("PBS_NODEFILE", "hosts")
    forget_launch()
    assert "PBS_NODEFILE" not in os.environ


AGENTS = {
    "nothing said": (OPEN_MPI, {}, "", "ssh", {}),
    "Open MPI 5": (OPEN_MPI, {"PRTE_MCA_plm_ssh_agent": "rsh -4 : ssh"}, "", "rsh -4", {}),
    "the name in Open MPI 4": (
        OPEN_MPI, {"OMPI_MCA_plm_rsh_agent": "rsh"}, "", "rsh", {"PRTE_MCA_plm_ssh_agent": "rsh"}
    ),
    "Open MPI 4": (OPEN_MPI_4, {"OMPI_MCA_plm_rsh_agent": "rsh"}, "", "rsh", {}),
    "MPICH": (MPICH, {"HYDRA_LAUNCHER_EXEC": "/x/ssh"}, "", "/x/ssh", {}),
    "an option": (OPEN_MPI, {}, "--mca plm_rsh_agent rsh", "rsh", {}),
    "MPICH's option": (MPICH, {"OAR_NODEFILE": "x"}, "-launcher-exec rsh", "rsh", {}),
    "Grid Engine": (OPEN_MPI, {"PE_HOSTFILE": "x"}, "", "/x/qrsh -inherit", {}),
    "LSF": (OPEN_MPI, {"LSB_DJOB_HOSTFILE": "x"}, "", "/x/blaunch",
            {"PRTE_MCA_plm_ssh_agent": "/x/blaunch"}),
    "OAR": (MPICH, {"OAR_NODEFILE": "x"}, "", "/x/oarsh",
            {"HYDRA_LAUNCHER_EXEC": "/x/oarsh"}),
}  # fmt: skip


@pytest.mark.parametrize("case", AGENTS)
def test_hosts_are_asked_by_what_mpirun_will_take(case, monkeypatch):
    kind, variables, options, words, told = AGENTS[case]
    monkeypatch.setattr(agents, "find_program", "/x/{}".format)
    found = agents.find_agent(kind, options.split(), variables)
    assert (" ".join(found.words), found.variables) == (words, told)


def test_hosts_with_the_same_problem_share_a_line():
    problems = {f"node{n}": ("it lacks torch",) for n in (1, 2, 3)} | {"x": ("no answer",)}
    with pytest.raises(ConfigurationError) as caught:
        Answers({"node4": {}}, problems).check()
    assert str(caught.value).splitlines() == [
        "4 of 5 hosts cannot take part:", "  node[1-3]: it lacks torch", "  x: no answer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("there", "here", "is_told"),
    [
        (["10.0.0.1"], ["10.0.0.2"], True),
        (["10.0.0.1"], ["127.0.1.1"], False),
        (["10.0.0.1", "fe80::1"], ["10.0.0.1"], False),
        (["10.0.0.1"], [], False),
    ],
)
def test_debian_lets_a_host_find_itself_at_a_loopback(there, here, is_told):
    answer = {"same": {}, "unreached": {}, "addresses": {"a": there}}
    own = {"same": {}, "addresses": {"a": here}}
    assert bool([*reachability._compare(answer, own, ())]) == is_told
    # Of one that has not answered itself nothing is told of others.
    silent = {**answer, "unreached": {"a": "timed out"}}
    assert not [*reachability._compare(silent, own, ("a",))]


def test_a_host_under_two_names_is_refused():
    names = ["localhost", OWN]
    answers = reachability.ask_hosts(names, Question((sys.executable,)))
    assert answers.problems == {OWN: ("it is the same machine as localhost: name it once",)}


@pytest.fixture
def other_ssh(tmp_path, monkeypatch):
    """Takes what stands in for ssh: lines of shell."""

    def write(text: str) -> None:
        write_program(tmp_path / "bin" / "ssh", text)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    return write


# It ends as it would after its time, by what is above it.
ABOVE = '"$(tr "\\0" " " </proc/$PPID/cmdline)"'
SAID = "echo at first >&2; echo at last >&2; exit"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f'case {ABOVE} in "timeout --signal=KILL 60 ssh "*) kill -KILL $$;; esac',
            "no answer within 60 s",
        ),
        (f"{SAID} 127", "it lacks {python} or {here}, which are here: at last"),
        (f"{SAID} 1", "Python fails there: at last"),
    ],
)
def test_a_host_without_an_answer_is_told_with_the_reason(other_ssh, monkeypatch, text, problem):
    other_ssh(text)
    told = []
    progress = contextlib.nullcontext(lambda *counts: told.append(counts))
    monkeypatch.setattr(reachability, "_open_progress", lambda: progress)
    answers = reachability.ask_hosts(["localhost", "10.99.0.1"], Question((sys.executable,)))
    expected = problem.format(python=sys.executable, here=os.getcwd())
    assert answers.problems == {"10.99.0.1": (expected,)}
    assert told == [(2, 2)], "so many of so many hosts asked"


def test_a_thousand_hosts_that_refuse_are_one_line_in_seconds(other_ssh):
    other_ssh('while [ "${1#-}" != "$1" ]; do shift 2; done; echo "$1 refuses" >&2; exit 255')
    names = [f"10.99.{high}.{low}" for high in range(6) for low in range(1, 201)]
    began = time.monotonic()
    answers = reachability.ask_hosts(names, Question((sys.executable,)))
    assert time.monotonic() - began < 120
    title, *lines = answers.describe_problems().splitlines()
    assert title.startswith("1200 of 1200 hosts") and len(lines) == 1
    assert lines[0].startswith("  10.99.0.[1-200],10.99.1.[1-200],")
    assert lines[0].endswith("'HOST refuses'; this must work without a question: ssh HOST true")


@pytest.mark.parametrize(("number", "answers"), [(signal.SIGINT, 0), (signal.SIGTERM, 1)])
def test_a_signal_ends_the_questions_at_once(other_ssh, tmp_path, number, answers):
    """Before the first start; before a restart, after an answer and an mpirun that fails."""
    other_ssh(f"""echo $$ >> {tmp_path}/asked
        [ $(wc -l < {tmp_path}/asked) -le {answers} ] || exec sleep 100
        while [ $# -gt 1 ]; do shift; done; eval "$1" """)
    version = "mpirun (Open MPI) 5.0.8"
    write_program(tmp_path / "mpirun", f"[ $1 = --version ] && echo '{version}' || exit 1")
    (tmp_path / "script.py").touch()
    words = front("--hosts", "10.99.0.1", "--restarts", 1, "script.py")
    command = [sys.executable, *words]
    mark, asked = f"asked-{os.getpid()}", tmp_path / "asked"
    own = {"MARK": mark, "MPIDDP_MPIRUN": str(tmp_path / "mpirun"), "PYTHONPATH": launchers.ROOT}
    variables = {**launchers.clean_environment(), **own, "PATH": os.environ["PATH"]}
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stderr=subprocess.PIPE) as job:
        while not asked.exists() or len(asked.read_text().split()) <= answers:
            time.sleep(0.02)
        job.send_signal(number)
        assert job.wait(reachability.ANSWER_SECONDS - 30) == 128 + number
        assert b"restart 1" not in job.stderr.read()
    launchers.until(lambda: not find_left(mark), "the end of what was asked", 10)


SCRIPT = """
    import os, socket, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(socket.gethostname(), dist.get_rank(), int(total), os.environ["ODD"], flush=True)
    if "WAIT" in os.environ:
        import time
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def hosts(slurm_cluster, tmp_path_factory):
    if obstacle := ssh.find_obstacle():
        pytest.skip(obstacle)
    with ssh.open_hosts(slurm_cluster, tmp_path_factory.mktemp("ssh")) as found:
        yield found


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def front(*words: object) -> list[str]:
    return ["-m", "mpiddp", *map(str, words)]


def interrupt(job: subprocess.Popen[str]) -> int:
    """Send SIGINT to what runs on the node; returns its exit code."""
    (child,) = psutil.Process(job.pid).children()
    child.send_signal(signal.SIGINT)
    return job.wait(slurm.COMMAND_SECONDS)


def find_left(mark: str) -> list[int]:
    """Processes on any node whose environment holds a text."""
    found = (pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))))
    return [pid for pid in found if mark in launchers.environ_of(pid).values()]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("launcher", "agent", "nodes"),
    [
        ("openmpi", "ssh", 2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("mpich", "ssh", 4), ("mpich", "oarsh", 2), ("openmpi", "oarsh", 2))
        ),
        pytest.param("impi", "ssh", 2, marks=launchers.marks_of("impi")),
    ],
)
def test_ranks_start_on_hosts_and_have_the_users_variables(
    hosts, script, tmp_path, launcher, agent, nodes
):
    row, odd = launchers.find(launcher), "a b,c;'d'=$HOME"
    left = hosts.find_tmp("node2") / f"prted.{2**22}"  # Of a daemon that was killed.
    left.mkdir(exist_ok=True)
    for name in ("pmix.node2.tool", "hwloc.sm"):
        (left / name).touch()
    os.utime(left, (0, 0))
    variables = {"ODD": odd, **row.environment, "MPIDDP_MPIRUN": str(row.mpirun)}
    listed, ranks = ("--hosts", f"node[1-{nodes}]:2"), nodes + 1
    if agent == "oarsh":
        (tmp_path / "nodes").write_text("node1\nnode1\nnode2\n")
        listed, variables["OAR_NODEFILE"] = (), str(tmp_path / "nodes")
        write_program(tmp_path / "oarsh", f'exec {hosts.folder}/bin/ssh "$@"')
        write_program(tmp_path / "ssh", "exit 1")
        variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = hosts.run("node1", *front("-n", ranks, *listed, script), cwd=script.parent, **variables)
    assert done.returncode == 0 and not left.exists(), done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {*ssh.NODES[:nodes]} and len(lines) == ranks
    assert all(line.endswith(f" {ranks} {odd}") for line in lines), done.stdout


@pytest.mark.slurm
def test_what_cannot_take_part_is_told_in_one_table(hosts, script, tmp_path):
    """Another script and torch, other addresses, a full disk, a password, a stopped sshd, an
    unknown name.

    The doctor examines the hosts that are left.
    """
    (tmp_path / "other.py").write_text("pass\n")
    own = subprocess.run(["hostname"], capture_output=True, text=True).stdout.strip()
    names = [*ssh.NODES, own]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
        f"10.99.0.{at} {name}\n" for at, name in enumerate(names, start=1)))  # fmt: skip
    (tmp_path / "torch").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    torch = importlib.metadata.distribution("torch")
    files = {
        script: tmp_path / "other.py",
        Path("/etc/hosts"): tmp_path / "hosts",
        Path(str(torch.locate_file(f"torch-{torch.version}.dist-info/METADATA"))): (
            tmp_path / "torch"
        ),
    }
    hosts.stop("node3")
    hosts.start("node3", keys="nobody.pub")
    hosts.stop("node4")
    listed = ("--hosts", "node[1-4]:1,nowhere:1")
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:

            def mount(there: Path, *words: str) -> None:
                """On node2 alone."""
                hosts.cluster.must("exec", "node2", "mount", *words, str(there))
                stack.callback(hosts.cluster.must, "exec", "node2", "umount", str(there))

            for there, other in files.items():
                mount(there, "--bind", str(other))
            mount(place := hosts.find_tmp("node2"), "-t", "tmpfs", "-o", "size=4k", "tmpfs")
            fill = f"head -c 4096 /dev/zero > {place}/full"
            hosts.cluster.must("exec", "node2", "sh", "-c", fill)
            done = hosts.run("node1", *front("-n", 4, *listed, script), cwd=tmp_path, ODD="x")
            seconds = time.monotonic() - began
            examined = hosts.run("node1", *front("doctor", *listed, *doctors.STAGE), cwd=tmp_path)
    finally:
        hosts.stop("node3")
        hosts.start("node3")
        hosts.start("node4")
    assert done.returncode == 2 and seconds < 60
    said = done.stderr
    assert "4 of 5 hosts cannot take part" in said
    assert f"node2: {script} differs from the one here" in said
    assert f"node2: torch is 1.0 there, {torch.version} here" in said
    assert "node2: node1 is at 10.99.0.1 there" in said
    assert "node2: no room for mpirun's files" in said and "No space left on device" in said
    assert "node3: ssh says" in said and "Permission denied" in said
    assert "node4: ssh says" in said and "Connection refused" in said
    assert "nowhere: ssh says" in said and "node1: " not in said.replace("node2: node1", "")
    assert examined.returncode == 2, examined.stderr
    report = examined.stdout
    assert "fail  hosts              4 of 5 hosts cannot take part:\n" in report
    assert "node2: torch is 1.0 there" in report and "1 rank on 1 node (node1)" in report


@contextlib.contextmanager
def start_waiting(
    hosts, script, *words: object, mark: str, launcher: str = "openmpi"
) -> Iterator[subprocess.Popen[str]]:
    """Four ranks on two hosts that have met and wait, with ``mark`` in their environment."""
    words = front("-n", 4, "--hosts", "node[1-2]:2", *words, script)
    row = launchers.find(launcher)
    own = {**row.environment, "MPIDDP_MPIRUN": str(row.mpirun)}
    command = hosts.command("node1", *words, ODD="x", WAIT=mark, **own)
    where = {**launchers.clean_environment(), "MPIDDP_CLUSTER_DIR": str(hosts.cluster.directory)}
    with subprocess.Popen(
        command, env=where, cwd=script.parent, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        for _ in range(4):
            assert job.stdout.readline().startswith("node")
        yield job


@pytest.mark.slurm
@pytest.mark.parametrize(
    "launcher", ["openmpi", pytest.param("impi", marks=launchers.marks_of("impi"))]
)
def test_an_interruption_leaves_nothing_on_any_host(hosts, script, launcher):
    mark = f"wait-{os.getpid()}"
    with start_waiting(hosts, script, mark=mark, launcher=launcher) as job:
        assert len(find_left(mark)) > 4
        assert interrupt(job) == 130
    launchers.until(lambda: not find_left(mark), "the end of all processes", 10)
    for name in ssh.NODES:
        assert not [*hosts.find_tmp(name).iterdir()], name
        assert hosts.cluster.must("exec", name, "ls", "/dev/shm").split() == [], name


@pytest.mark.slurm
def test_a_restart_goes_on_without_a_host_that_died(hosts, script):
    with start_waiting(hosts, script, "--restarts", 1, mark="here") as job:
        try:
            hosts.cluster.must("kill", "node2")
            # mpirun may write about the host that is gone, too.
            lines = (line for line in job.stdout if line.startswith("node"))
            found = [line.split()[:3] for line in itertools.islice(lines, 2)]
        finally:
            hosts.cluster.must("revive", "node2")
            hosts.start("node2")
            interrupt(job)
    assert sorted(found) == [["node1", "0", "2"], ["node1", "1", "2"]]
