"""Collective calls that cannot end well: they end, and say why."""

import itertools
import re
import signal

import pytest

import differences
import facts
import launchers
import ranks

pytestmark = pytest.mark.mpi

DEADLINE = 3.0
"""Seconds of a call's wait."""
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2", "UCX_TLS": "posix,self"}
"""MPICH takes the ranks in turn for ranks of two nodes; UCX aborts where a process has gone that it
copies from."""

# By transport: launcher, number of ranks, variables.
JOBS: dict[str, tuple[str, int, dict[str, str]]] = {
    "shared-memory": ("openmpi", 2, {}),
    "mpi": ("openmpi", 2, {}),
    "torch": ("mpich", 2, {}),
    "shared-memory+mpi": ("mpich", 3, TWO_NODES),
}
USUAL = ("is stopped", "shared-memory")


def find_report(result: launchers.Result) -> str:
    """The one line that says what went wrong."""
    lines = [line for line in facts.messages(result) if re.match(r"mpiddp: rank \d", line)]
    assert len(lines) == 1, str(result)
    return lines[0]


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case != USUAL))
        for case in itertools.product(("is killed", "is stopped"), JOBS)
    ],
)
def test_a_rank_that_is_lost_ends_the_job(how, transport, tmp_path):
    name, size, variables = JOBS[transport]
    # A killed rank is found long before the deadline.
    deadline = 60.0 if how == "is killed" else DEADLINE
    program = [launchers.PROGRAMS / "victims.py", transport, how, str(deadline)]
    result = launchers.run(name, size, program, env=variables, cwd=tmp_path)
    assert "Traceback" not in result.output, str(result)
    if how == "is killed":
        # The launchers' code is the victim's; Hydra gives the signal alone.
        assert result.returncode in (6, 128 + signal.SIGKILL, signal.SIGKILL), str(result)
        lost = r"mpiddp: rank 1 of \d on \S+ was lost: it was killed by SIGKILL"
        assert re.match(lost, find_report(result)), str(result)
        return
    result.expect(6)
    # Between nodes, the rank that is named may itself wait for the stopped one.
    peer = r"rank \d" if how == "is stopped" and transport == "shared-memory+mpi" else "rank 1"
    place = r"(in step \d+ of \d+|at its end)"
    said = (
        rf"mpiddp: rank [02] of [23] on \S+: all-reduce \(one-shot over {re.escape(transport)}\), "
        rf"{place}: waited for {peer} on [^\s:]+"
    )
    assert re.match(said, find_report(result)), str(result)
    # Gloo's own wait ends at about the same time.
    assert re.search(f" for {DEADLINE:g} s| waiting {DEADLINE * 1000:g}ms", result.stderr)


LEAVES = """
import torch, mpiddp
with mpiddp.init(timeout=60) as session:
    mpiddp.all_reduce(torch.ones(4))
    if session.world.rank == 0:
        session._timeout = 3.0
        mpiddp.all_reduce(torch.ones(4), transport="torch")
"""


@pytest.mark.long
def test_a_rank_that_leaves_instead_of_a_first_call_over_torch_is_told_of_in_one_line(tmp_path):
    result = launchers.run("openmpi", 2, ["-c", LEAVES], cwd=tmp_path).expect(6)
    report = find_report(result)
    assert "transport torch waited 3 s for the other ranks" in report
    assert report.endswith(" (called at <string>:7)"), report
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "transports", "variables"),
    [
        ("openmpi", ("shared-memory", "mpi", "torch"), {}),
        pytest.param("mpich", ("shared-memory+mpi",), TWO_NODES, marks=pytest.mark.long),
    ],
)
def test_calls_that_differ_are_never_summed(name, transports, variables, tmp_path):
    program = [launchers.PROGRAMS / "differences.py", *transports]
    launchers.run(name, 3, program, env=variables, cwd=tmp_path).expect(differences.DONE)
    reports = ranks.read_reports(tmp_path, 3)
    for transport in transports:
        for case in differences.make_cases(transport):
            outcomes = [report[transport][case] for report in reports]
            errors = [outcome for outcome in outcomes if outcome[0] == "error"]
            # An error on any rank ends a job; a neighbour may have been told of it.
            own = [outcome for outcome in errors if outcome[1] != "PeerFailedError"]
            assert own, (transport, case, outcomes)
            kinds = ("ConfigurationError", "DifferentCallError", "PeerLostError")
            assert all(kind in kinds for _, kind, _ in own), (transport, case, outcomes)
            for _, _, said in errors:
                assert re.search(r"rank \d", said), (transport, case, said)


def test_calls_that_differ_are_compared_for_debugging(pool):
    debug = {"MPIDDP_DEBUG": "1"}
    reports = pool("openmpi", 3).call(differences.compare, "shared-memory", env=debug).values
    for case in differences.make_cases("shared-memory"):
        for report in reports:
            assert report[case][:2] == ["error", "ConfigurationError"], (case, report[case])
            said = "differs from rank 0's on rank 1: rank 0 has 'call .*rank 1 has 'call "
            assert re.search(said, report[case][2]), case
    assert [report["good"] for report in reports] == [[3.0] * 5] * 3
