"""Good files of every kind that mpiddp reads, what reads them, and what strangers make of them."""

import contextlib
import copy
import hashlib
import json
import re
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import strategies as st

import planted_records as planted
from benchmarks.judge.fit.fitted import fit_records, is_fit, read_fit, write_fit
from benchmarks.records.schema import read_record
from launchers import ROOT
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage import owner as owners
from mpiddp.checkpoints.storage.manifest import DamageError
from mpiddp.collectives.tuning import Range, Section, fit_table, read_table, write_table
from mpiddp.errors import CheckpointError, ConfigurationError, ScheduleError
from mpiddp.front import front
from mpiddp.process import directory_lock, job_directory, publication
from mpiddp.process.outcome import Outcome
from mpiddp.schedules.plans.conversion import make_schedule
from mpiddp.schedules.plans.loading import read_plans
from mpiddp.schedules.plans.plan_proof import prove_plan
from mpiddp.training.options.config import read_toml
from mpiddp.training.records.history import read_histories
from mpiddp.training.records.metrics import Row
from mpiddp.training.records.metrics_file import read_last_row

SECONDS, BYTES = 60, 2 << 30
"""What reading a file may take, on a busy machine."""
NAMED = (ConfigurationError, ScheduleError, CheckpointError, DamageError)
"""What is said in one line."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Fails in a body that takes too long, and raises MemoryError in one that takes too much."""

    def expire(*_: object) -> None:
        # A TimeoutError is an OSError, which what is tested may catch.
        pytest.fail(f"no end after {SECONDS} s")

    status = Path("/proc/self/status").read_text()
    used = int(re.findall(r"VmSize:\s+(\d+) kB", status)[0]) << 10
    before, usual = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, before[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _prove(path: Path) -> None:
    for plan in read_plans(path):
        prove_plan(plan)
        make_schedule(plan)


def _use_table(path: Path) -> None:
    table = read_table(path)
    for section in table.sections:
        tuning = fit_table(table, section.nodes, ("mpi",))
        tuning.find(section.key, 1000)


def _use_fit(path: Path) -> None:
    is_fit(path)
    read_fit(path).make_machine((2, 2))


def _draw(path: Path) -> None:
    for history in read_histories([str(path.parent)]):
        history.find_stages()
        history.find_values("loss")
        history.find_curve("loss")
    read_last_row(path)


def _use_manifest(path: Path) -> None:
    """Whoever wrote it has added its digest."""
    if path.is_file():
        text = path.read_bytes().decode(errors="replace")
        path.write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    manifest = manifests.read_manifest(path.parent)
    manifests.find_problems(path.parent, manifest)


def _use_owner(path: Path) -> None:
    found = owners.read_owner(path.parent)
    if found is not None:
        found.is_same(owners.Owner.make("a", {"seed": 1}))
        found.describe(owners.UNKNOWN)


def _use_outcome(path: Path) -> None:
    found = job_directory.read_outcome(path.parent)
    assert found is None or (type(found["code"]) is int and isinstance(found["path"], str | None))


def _use_address(path: Path) -> None:
    with contextlib.suppress(ValueError):
        publication.read_address(path)


def _use_options(path: Path) -> None:
    front._explain_new_start(path.parent)
    manifests.find_directory(path.parent)
    read_toml(path)


def _use_holder(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            str(directory_lock._read(file.fileno()))


@dataclass(frozen=True)
class Kind:
    name: str
    """Of the file."""
    make: Callable[[Path], object]
    """Writes a good one to a path."""
    read: Callable[[Path], object]
    """Raises one of NAMED, or what the file system says, for what cannot be used."""


def _copy(name: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes((ROOT / "tests/recorded/plans" / name).read_bytes())


def _dump(content: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(content))


def _make_record(path: Path) -> None:
    planted.write_record(path, planted.make_messages(planted.MACHINE, sizes=(8, 1024, 65536)))


def _make_fit(path: Path) -> None:
    _make_record(path)
    write_fit(path, fit_records([read_record(path)], None, "float32"))


SECTION = Section("all-reduce", (2, 2), "float32", "cpu", (Range(8, 4000, "ring:segments=2"),))
ROW = Row(
    attempt=1, epoch=1, step=5, loss=0.5, metrics={"accuracy": 0.5}, learning_rate=0.1,
    samples_per_second=9.0, seconds=1.0, stages={"forward": 0.5}, staleness={0: 5},
)  # fmt: skip
MANIFEST = manifests.Manifest(
    sequence=1, step=2, attempt="attempt-1", owner="0" * 16, world=2, configuration={"seed": 1},
    versions={"torch": "2.13"}, score=0.5, files={"a": manifests.File(3, "0" * 32)},
)  # fmt: skip
OPTIONS = 'resume = "never"\ncheckpoint_dir = "elsewhere"\nepochs = 3\nlearning_rate = 0.5\n'
KINDS = {
    "msccl": Kind("plan.xml", _copy("msccl_tools_1step_3.xml"), _prove),
    "packets": Kind("plan.json", _copy("mscclpp_allreduce_packet.json"), _prove),
    "pipeline": Kind("plan.json", _copy("mscclpp_allreduce_pipeline.json"), _prove),
    "switch": Kind("plan.json", _copy("mscclpp_reduce_nvls.json"), _prove),
    "groups": Kind("plan.json", _copy("mscclpp_reduce_tbg.json"), _prove),
    "table": Kind("table.json", lambda path: write_table(path, {}, [SECTION]), _use_table),
    "record": Kind("record.jsonl", _make_record, read_record),
    "fit": Kind("fit.json", _make_fit, _use_fit),
    "metrics": Kind("metrics.jsonl", lambda path: path.write_text(f"{ROW.to_json()}\n" * 2), _draw),
    "manifest": Kind(manifests.MANIFEST, _dump(asdict(MANIFEST)), _use_manifest),
    "owner": Kind(owners.OWNER, _dump(asdict(owners.Owner.make("a", {"seed": 1}))), _use_owner),
    "outcome": Kind(
        job_directory.OUTCOME, _dump(asdict(Outcome(6, "lost", 0, "here", 5, 1))), _use_outcome
    ),
    "address": Kind(publication.ADDRESS_FILE, _dump({"address": "@a", "token": "b"}), _use_address),
    "options": Kind("config.toml", lambda path: path.write_text(OPTIONS), _use_options),
    "holder": Kind("lock", _dump(asdict(directory_lock.Holder.of_this_process())), _use_holder),
}


@cache
def make_good(name: str) -> bytes:
    """The same bytes whenever they are asked for."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, KINDS[name].name)
        KINDS[name].make(path)
        return path.read_bytes()


VALUES: Mapping[str, str] = {
    "list": "[]", "object": "{}", "null": "null", "text": '"abc"', "negative": "-1", "zero": "0",
    "fraction": "0.5", "infinite": "1e400", "nan": "NaN", "minus": "-Infinity", "large": str(2**63),
    "larger": str(2**64 + 1), "digits": "9" * 5000, "billion": "1000000000", "true": "true",
    "deep": "[" * 5000 + "]" * 5000, "nested": '{"a":' * 80 + "1" + "}" * 80,
    "surrogate": '"\\ud800"', "nul": '"\\u0000"', "long": f'"{"a" * 100_000}"',
}  # fmt: skip
"""In JSON's words."""
MARK = "@hostile@"


def _list_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from _list_places(each, (*path, key))


@st.composite
def change_json(draw: st.DrawFn, text: str) -> str:
    """One value replaced, deleted, or given twice."""
    content, word = json.loads(text), draw(st.sampled_from(sorted(VALUES)))
    path = draw(st.sampled_from(list(_list_places(content))))
    if not path:
        return VALUES[word]
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    how = draw(st.sampled_from(["replace", "replace", "replace", "delete", "twice"]))
    if how == "delete":
        del parent[path[-1]]
        return json.dumps(content)
    if how == "twice" and isinstance(parent, dict):
        parent[MARK] = 0
        again = f"{json.dumps(path[-1])}: {VALUES[word]}"
        return json.dumps(content).replace(f'"{MARK}": 0', again)
    parent[path[-1]] = MARK
    return json.dumps(content).replace(f'"{MARK}"', VALUES[word])


@st.composite
def change_lines(draw: st.DrawFn, text: str) -> str:
    lines = text.splitlines()
    number = draw(st.integers(0, len(lines) - 1))
    lines[number] = draw(change_json(lines[number]))
    return "\n".join(lines) + "\n"


@st.composite
def change_xml(draw: st.DrawFn, text: str) -> str:
    root = ElementTree.fromstring(text)
    element = draw(st.sampled_from(list(root.iter())))
    how = draw(st.sampled_from(["value", "value", "value", "delete", "child", "name"]))
    name = draw(st.sampled_from(sorted(element.attrib)))
    if how == "value":
        element.set(name, json.loads(f'"{draw(st.sampled_from(XML_VALUES))}"'))
    elif how == "delete":
        del element.attrib[name]
    elif how == "child":
        # A copy: an element in itself would have no end.
        element.append(copy.deepcopy(draw(st.sampled_from(list(root.iter())))))
    else:
        element.tag = name
    return ElementTree.tostring(root, encoding="unicode")


XML_VALUES = ("", "abc", "-1", "0", "1e400", "NaN", str(2**63), "1000000000", "9" * 5000, "1.5")


@st.composite
def change_toml(draw: st.DrawFn, text: str) -> str:
    lines = text.splitlines()
    number = draw(st.integers(0, len(lines) - 1))
    values = [*VALUES.values(), "nan", "inf", "1979-05-27"]
    lines[number] = f"{lines[number].partition('=')[0]}= {draw(st.sampled_from(values))}"
    return "\n".join(lines) + "\n"


CHANGES = {
    ".xml": change_xml, ".json": change_json, "": change_json, ".jsonl": change_lines,
    ".toml": change_toml,
}  # fmt: skip


@st.composite
def change_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Truncated, a bit flipped, another encoding, or something before it or in it."""
    place = draw(st.integers(0, len(data) - 1))
    made = {
        "cut": data[:place],
        "flip": data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :],
        "invalid": data[:place] + b"\xff\xfe" + data[place:], "mark": b"\xef\xbb\xbf" + data,
        "wide": data.decode().encode("utf-16"), "doubled": data + data,
        "line": data[:place] + b"\n" + data[place:],
        "bracket": data[:place] + b"[" * 3000 + data[place:],
    }  # fmt: skip
    return made[draw(st.sampled_from(sorted(made)))]
