"""Files that others have written: a value, or one line that names file and field; never more."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hostile import CHANGES, KINDS, NAMED, change_bytes, limited, make_good
from mpiddp.checkpoints.__main__ import show
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage import owner as owners
from mpiddp.checkpoints.storage.finding import find_newest
from mpiddp.checkpoints.storage.rank_group import RankGroup
from mpiddp.errors import ConfigurationError, ContentError
from mpiddp.files import MOST_BYTES, MOST_DEPTH, decode, decode_xml, read_json
from saves import list_names, write


@dataclass(frozen=True)
class Leaf:
    cnt: Annotated[int, msgspec.Meta(ge=1, le=100)]
    share: float | None = None
    rest: Any = None

    def __post_init__(self) -> None:
        if self.cnt == 7:
            raise ContentError("seven is taken")


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...] = ()
    named: Mapping[str, Leaf] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)


SAID = {
    "[]": "expected an object, found []",
    "": "expected JSON: Expecting value: line 1 column 1 (char 0)",
    '{"leaves": [{"cnt": "abc"}]}': "leaves[0].cnt: expected a whole number, found 'abc'",
    '{"leaves": [{"cnt": 0}]}': "leaves[0].cnt: expected a whole number of 1 or more, found 0",
    '{"leaves": [{"cnt": true}]}': "leaves[0].cnt: expected a whole number, found True",
    '{"leaves": [{"cnt": 7}]}': "leaves[0]: seven is taken",
    '{"leaves": [{}]}': "leaves[0]: lacks cnt",
    '{"leaves": {}}': "leaves: expected a list, found {}",
    '{"leaves": [{"cnt": 1, "share": NaN}]}':
        "leaves[0].share: expected a number or null, found 'NaN'",
    '{"named": {"a": {"cnt": 1}, "b.c": {"cnt": []}}}':
        "named['b.c'].cnt: expected a whole number, found []",
    '{"counts": {"a": 1}}': "a key of counts: expected a whole number",
    '{"leaves": [{"cnt": 1, "rest": ' + "[" * 80 + "]" * 80 + "}]}":
        "expected at most 64 levels of lists and objects",
}  # fmt: skip


@pytest.mark.parametrize("text", SAID)
def test_a_line_names_the_field_and_what_stands_there(text, tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(ContentError) as caught:
        read_json(path, Tree)
    assert str(caught.value) == f"{path}: {SAID[text]}"


def nest(depth: int, word: str = "") -> str:
    return f'{{"leaves": [{{"cnt": 1, "rest": {"[" * depth}{word}{"]" * depth}}}]}}'


@pytest.mark.parametrize("word", ["", '"[[["', r'"\"[\\"', r'"]", "\\\"]"', '{"a": "}"}'])
def test_brackets_in_texts_nest_nothing(word):
    most = MOST_DEPTH - 3 - word.startswith("{")
    assert decode(nest(most, word), Tree).leaves[0].cnt == 1
    with pytest.raises(ContentError, match="levels of lists"):
        decode(nest(most + 1, word), Tree)


def test_numbers_that_json_does_not_have_are_texts():
    found = decode('{"cnt": 1, "rest": [NaN, -Infinity, 1e400, 1e300]}', Leaf)
    assert found.rest == ["NaN", "-Infinity", "1e400", 1e300]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<!DOCTYPE a [<!ENTITY b "c">]><leaf cnt="1">&b;</leaf>', "no document type, found 'a'"),
        ("<leaf cnt='1'>" * 80 + "</leaf>" * 80, "expected at most 64 levels of elements"),
        ("<leaf", "expected XML: unclosed token"),
        ("<twig/>", "expected an element leaf, found twig"),
        ("<leaf cnt='x'/>", "cnt: expected a whole number, found 'x'"),
        ("<leaf cnt='1'><cnt/></leaf>", "cnt is both an element and a field"),
    ],
)
def test_xml_that_is_no_leaf(text, said):
    assert decode_xml(b"<leaf cnt='3'/>", "leaf", Leaf) == Leaf(3)
    with pytest.raises(ContentError, match=said):
        decode_xml(text.encode(), "leaf", Leaf)


EXAMPLES = 60
"""Of each kind of file."""


def use(name: str, path: Path) -> str:
    """What is said of a file; empty if it can be used."""
    with limited():
        try:
            KINDS[name].read(path)
        except NAMED as error:
            assert "\n" not in str(error)
            return str(error)
    return ""


@pytest.mark.parametrize("name", KINDS)
def test_a_good_file_is_read(name, tmp_path):
    path = tmp_path / KINDS[name].name
    path.write_bytes(make_good(name))
    assert use(name, path)[:4] == ("race" if name == "groups" else "")


@pytest.mark.parametrize("name", KINDS)
@seed(20261128)
@settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_a_file_holds(name, data, tmp_path):
    path, good = tmp_path / KINDS[name].name, make_good(name)
    if data.draw(st.integers(0, 3)):
        path.write_text(data.draw(CHANGES[path.suffix](good.decode())))
    else:
        path.write_bytes(data.draw(change_bytes(good)))
    use(name, path)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_file_is_not_waited_for(name, tmp_path):
    path = tmp_path / "run" / KINDS[name].name
    makers = {
        "directory": path.mkdir, "pipe": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path), "endless": lambda: path.symlink_to("/dev/zero"),
        "empty": path.touch,
        "large": lambda: path.write_bytes(b"") or os.truncate(path, MOST_BYTES + 1),
    }  # fmt: skip
    for what, make in makers.items():
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        make()
        said = use(name, path)
        is_silent = name in ("owner", "outcome", "address", "holder")
        assert said or is_silent or (name, what) == ("options", "empty"), what


ALGO = (
    '<algo name="a" proto="LL" nchunksperloop="{chunks}" ngpus="{ranks}" coll="allreduce" '
    'inplace="1"><gpu id="0" i_chunks="0" o_chunks="0" s_chunks="{scratch}"/></algo>'
)
ROUNDS = (
    '{{"name": "a", "collective": "allreduce", "inplace": true, "reuse_resources": true, "gpus": '
    '[{{"id": 0, "input_chunks": 1, "output_chunks": 1, "scratch_chunks": {scratch}, '
    '"threadblocks": [{{"id": 0, "ops": [{{"name": "pipeline", "iter_context": {{"unit_size": '
    '{unit}}}, "ops": [{{"name": "nop"}}]}}]}}]}}]}}'
)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("msccl", ALGO.format(chunks=1, ranks=10**9, scratch=0), "ngpus: .* at most 4096"),
        ("msccl", ALGO.format(chunks=10**9, ranks=1, scratch=0), "nchunksperloop: .* at most"),
        ("msccl", ALGO.format(chunks=1, ranks=1, scratch=2**40), r"gpu\[0\].s_chunks: .* at most"),
        ("pipeline", ROUNDS.format(scratch=1, unit=2), "again after 33,554,432 rounds"),
        ("pipeline", ROUNDS.format(scratch=1, unit=0), "unit_size: .* of 1 or more, found 0"),
        ("pipeline", ROUNDS.format(scratch=10**9, unit=1), "scratch_chunks: .* at most 1048576"),
    ],
)
def test_large_numbers_take_neither_memory_nor_time(name, text, said, tmp_path):
    path = tmp_path / KINDS[name].name
    path.write_text(text)
    with limited(), pytest.raises(ConfigurationError, match=rf"^{path}: .*{said}"):
        KINDS[name].read(path)


HOSTILE = ["[]", "{}", "null", "", "[" * 100_000, '{"format": "2"}', '"\\ud800"']


@pytest.mark.parametrize("field_name", ["sequence", "step", "files", "score", "configuration", ""])
def test_a_hostile_manifest_is_one_bad_checkpoint(field_name, tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    write(folder, 1, 2, 3)
    path = folder / "step-3" / manifests.MANIFEST
    text = path.read_text().rpartition("\n")[0].rpartition("\n")[0]
    made = [text.replace(f'"{field_name}":', f'"{field_name}": "abc", "x":', 1)]
    for content in made if field_name else HOSTILE:
        path.write_text(content)
        with pytest.raises(manifests.DamageError, match=r"manifest\.json: "):
            KINDS["manifest"].read(path)
        survey = find_newest(folder, RankGroup())
        assert survey.newest is not None and survey.newest.path == folder / "step-2"
        show(folder, is_quick=False)
        rows = capsys.readouterr().out.splitlines()
        assert "damaged: manifest.json: " in rows[-3] and rows[-1].endswith("valid")
        assert list_names(folder) == ["step-1", "step-2", "step-3"]


def test_a_score_that_is_no_number_damages_nothing(tmp_path):
    """Earlier releases wrote them."""
    write(tmp_path, 1, score=float("nan"))
    assert manifests.read_manifest(tmp_path / "step-1").score is None


@pytest.mark.parametrize(
    "text", [*HOSTILE, '{"format": 1, "run": 3}', '{"format": 1, "run": "a", "identity": []}']
)
def test_a_hostile_owner_is_an_unknown_one(text, tmp_path):
    write(tmp_path, 1, 2)
    (tmp_path / owners.OWNER).write_text(text)
    assert owners.read_owner(tmp_path) is owners.UNKNOWN
    survey = find_newest(tmp_path, RankGroup())
    assert survey.newest is not None and survey.newest.path == tmp_path / "step-2"
