"""What ``export`` writes, read back; and files that ``--load`` takes, in the commands."""

import re
from itertools import chain, product
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmark_runs import record_benchmark
from benchmarks import __main__ as commands
from benchmarks.records.schema import read_record
from benchmarks.show import progress
from benchmarks.study import export, prove
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.plans.traces import COMPUTE, RECEIVE, SEND, write_chakra, write_goal
from mpiddp.schedules.schedule import project

RECORDED = Path(__file__).parents[1] / "recorded" / "plans"


def read_goal(text):
    """Each rank's operations: verb, bytes, peer, tag, the comment before, and what it requires."""
    ranks, comment = {}, ""
    for line in text.splitlines():
        if begin := re.fullmatch(r"rank (\d+) {", line):
            operations = ranks[int(begin[1])] = {}
        elif line.startswith("// "):
            comment = line[3:]
        elif sent := re.fullmatch(r"(l\d+): (send|recv) (\d+)b (?:to|from) (\d+) tag (\d+)", line):
            numbers = map(int, sent.groups()[2:])
            operations[sent[1]] = (sent[2], *numbers, comment, [])
        elif added := re.fullmatch(r"(l\d+): calc (\d+)", line):
            operations[added[1]] = ("calc", int(added[2]), None, None, "", [])
        elif needs := re.fullmatch(r"(l\d+) requires (l\d+)", line):
            operations[needs[1]][-1].append(needs[2])
        else:
            assert line in ("", "}") or line == f"num_ranks {len(text.split('rank ')) - 1}"
    return ranks


def _read_number(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def read_message(data):
    """The fields of a protocol buffer, in their order, as numbers and bytes."""
    at, found = 0, []
    while at < len(data):
        key, at = _read_number(data, at)
        value, at = _read_number(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        found.append((key >> 3, value))
    return found


def read_chakra(data):
    """The nodes of a trace: type, name, what they depend on, attributes, microseconds."""
    at, messages = 0, []
    while at < len(data):
        length, at = _read_number(data, at)
        messages.append(read_message(data[at : at + length]))
        at += length
    assert messages[0] == [(1, b"0.0.4")]
    nodes = {}
    for message in messages[1:]:
        fields = dict(message)
        depends, place = [], 0
        while place < len(fields.get(5, b"")):
            number, place = _read_number(fields[5], place)
            depends.append(number)
        attributes = {}
        for name, value in (read_message(each) for field, each in message if field == 10):
            attributes[name[1].decode()] = value
        nodes[fields[1]] = (fields[3], fields[2].decode(), depends, attributes, fields.get(7))
    return nodes


CASES = [("ring", 4), ("direct", 3), ("recursive-doubling", 6), ("naive-ring:segments=2", 3)]


def list_messages(schedule):
    """Each rank's, in order: whether it sends, the transfer, step, bytes, and what is done."""
    bounds = schedule.bounds(100)
    return [
        [
            (each.src == rank, each, step, 4 * (bounds[each.hi] - bounds[each.lo]),
             "added" if each.reduce else "copied")
            for step, receives, sends in rounds
            for each in (*receives, *sends)
        ]
        for rank, rounds in enumerate(project(schedule))
    ]  # fmt: skip


def count_added_bytes(messages):
    return sum(size for sends, _, _, size, how in messages if how == "added" and not sends)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_goal_read_back_is_the_schedule(name, ranks):
    schedule = registry.parse(name).build(ranks)
    read = read_goal(write_goal(schedule, 100, 4, 1e-6))
    assert sorted(read) == list(range(ranks))
    for rank, messages in enumerate(list_messages(schedule)):
        additions = sum(each[1] for each in read[rank].values() if each[0] == "calc")
        assert additions == 1000 * count_added_bytes(messages)
        found = [each for each in read[rank].values() if each[0] != "calc"]
        assert [each[:5] for each in found] == [
            ("send" if sends else "recv", size, each.dst if sends else each.src, step,
             f"step {step}: chunks {each.lo} to {each.hi} are {how}")
            for sends, each, step, size, how in messages
        ]  # fmt: skip
        # All of a step come before all of the next.
        steps = {label: each[3] for label, each in read[rank].items() if each[0] != "calc"}
        for label, step in steps.items():
            before = _find_all_before(read[rank], label)
            assert {each for each in steps if steps[each] < step} == before & steps.keys()


def _find_all_before(operations, label):
    found, stack = set(), [label]
    while stack:
        for cause in operations[stack.pop()][-1]:
            if cause not in found:
                found.add(cause)
                stack.append(cause)
    return found


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_chakra_read_back_is_the_schedule(name, ranks):
    schedule = registry.parse(name).build(ranks)
    traces = write_chakra(schedule, 100, 4, 1e-6)
    for messages, data in zip(list_messages(schedule), traces, strict=True):
        nodes = read_chakra(data)
        assert list(nodes) == list(range(len(nodes)))
        assert all(cause < number for number, node in nodes.items() for cause in node[2])
        found, microseconds = [], 0
        for kind, text, _, attributes, duration in nodes.values():
            assert attributes["is_cpu_op"] == (27, 0)
            if kind == COMPUTE:
                assert attributes["num_ops"] == (9, duration // 4)
                microseconds += duration
            else:
                # An int32 each, but the size is an int64: what ASTRA-sim's feeder asks for.
                (size,) = [attributes["comm_size"][1]]
                assert attributes["comm_size"][0] == 9
                src, dst, tag = (attributes[f"comm_{each}"] for each in ("src", "dst", "tag"))
                assert {src[0], dst[0], tag[0]} == {7}
                found.append((kind, src[1], dst[1], tag[1], size, text.split(": ")[1]))
        assert found == [
            (SEND if sends else RECEIVE, each.src, each.dst, step, size,
             f"{how} chunks {each.lo} to {each.hi}")
            for sends, each, step, size, how in messages
        ]  # fmt: skip
        assert microseconds == count_added_bytes(messages)


def test_every_format_is_written(tmp_path, capsys):
    files = [f"{tmp_path}/ring.{ending}" for ending in ("xml", "json", "et", "goal")]
    export.main(["ring", "--ranks", "3", *chain(*product(["--output"], files))])
    words = capsys.readouterr().out.splitlines()
    assert words[0] == f"wrote {tmp_path}/ring.xml: ring on 3 ranks, 4 steps, 12 messages"
    assert words[2].startswith(f"wrote {tmp_path}/ring.0.et and 2 more: ring on 3 ranks, 4 ste")
    assert words[2].endswith(", 1 MiB")
    assert len(list(tmp_path.iterdir())) == 6
    prove.main(["--load", str(tmp_path / "ring.xml"), str(tmp_path / "ring.json")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["verdict", "proved", "proved"]


def test_an_algorithm_of_your_own_joins_every_model(star, tmp_path, capsys, monkeypatch):
    picture, plan, bar = tmp_path / "star.svg", RECORDED / "msccl_tools_1step_3.xml", MagicMock()
    monkeypatch.setattr(progress, "tqdm", bar)
    words = {
        "prove": ["--ranks", "5", "--processes", "1"],
        "explain": ["star", "--ranks", "3", "--output", str(picture)],
        "simulate": ["star", "--ranks", "4"],
        "numerics": ["star", "--ranks", "4", "--dtype", "float32", "--elements", "64"],
        "export": ["star", "--ranks", "3", "--output", str(tmp_path / "star-plan.xml")],
    }
    for command, rest in words.items():
        commands.run([command, *rest, "--load", str(star), str(plan)])
        assert "star" in capsys.readouterr().out, command
        total = sum(call.kwargs["total"] for call in bar.call_args_list)
        assert bar.return_value.__enter__.return_value.update.call_count == total, command
    assert picture.exists()


def read_lines(path, kind):
    return [line for line in read_record(path).others if line["kind"] == kind]


def test_only_what_is_loaded_is_proved_and_by_processes_too(star, tmp_path):
    record = tmp_path / "proof.jsonl"
    record_benchmark(record, "prove", "--load", str(star), "--ranks", "5")
    assert [line["algorithm"] for line in read_lines(record, "proof")] == ["star"]


def test_plans_are_proved_side_by_side(tmp_path, capsys):
    record = tmp_path / "proof.jsonl"
    names = ["azure_ag_hier_4_LL.xml", "msccl_tools_1step_3.xml", "mscclpp_reduce_tbg.json"]
    files = [str(RECORDED / name) for name in names]
    odd = tmp_path / "odd.xml"
    odd.write_text("<topology/>")
    with pytest.raises(ScheduleError, match="1 of 4 plans do not keep their promise"):
        prove.main(["--load", *files, str(odd), "--output", str(record)])
    lines = capsys.readouterr().out.splitlines()
    words = [re.split("  +", line)[-1] for line in lines[1:4]]
    assert words == ["proved", "proved, bits differ", "WRONG"]
    assert re.split("  +", lines[4]) == ["odd.xml", "not read"]
    assert lines[5] == "bits differ: every sum is complete, but ranks add in different orders"
    assert lines[6].startswith("mscclpp_reduce_tbg.json: race: rank 0, thread block 1, step 6")
    assert lines[7] == "odd.xml: expected an element algo, found topology"
    assert [plan["verdict"] for plan in read_lines(record, "plan")][2:] == ["WRONG", "not read"]
    with pytest.raises(ConfigurationError, match=r"expected an element algo, found topology$"):
        prove.main(["--load", str(odd)])
