"""What options may hold: files to write, values in TOML, references; and the words for mistakes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from mpiddp.errors import ConfigurationError
from mpiddp.options import checks, outputs, toml
from mpiddp.options.fields import Argument, list_fields
from mpiddp.options.outputs import FOLDER, PICTURE, RECORD, Kind, Output, Outputs, writes
from mpiddp.options.reader import read

PLANS = Kind("plans", (FOLDER,))


@dataclass(frozen=True)
class Writing:
    """Writes."""

    output: Annotated[Outputs, writes(RECORD, PICTURE, PLANS)] = ()
    """To write."""
    count: Annotated[int, Argument(read=checks.at_least(1))] = 1
    """Of them."""
    share: float = 0.5
    """Of all."""
    on: bool = False
    """Whether."""
    kind: Literal["round", "square"] = "round"
    """Form."""


def write(words: str) -> Outputs:
    found = read(Writing, words.split(), "python -m writing", "Writes.").output
    outputs.check_outputs(found, [Path("read.jsonl"), None])
    return found


@pytest.mark.usefixtures("writable")
def test_the_end_of_a_name_says_the_kind_of_file():
    Path("there").mkdir()
    found = write("--output a.JSONL --output b.svg --output b.png --output there")
    assert [each.kind for each in found] == [RECORD, PICTURE, PICTURE, PLANS]
    assert [each.kind.is_drawn for each in found] == [False, True, True, False]
    assert outputs.find(found, PICTURE) == [Path("b.svg"), Path("b.png")]
    assert outputs.find_one(found, RECORD) == Path("a.JSONL")
    assert outputs.find_one(write("--output new/x/"), RECORD) is None and not Path("new").exists()


@pytest.mark.usefixtures("writable")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--output x.txt", "expected a name that ends in .jsonl (record), .svg, .png or .pdf (p"),
        ("--output .svg", "found '.svg'"),
        ("--output gone/a.svg", "gone/a.svg cannot be written: there is no directory gone"),
        ("--output /proc/new/x/", "/proc/new/x cannot be written: "),
        ("--output a.jsonl --output b.jsonl", "b.jsonl are both .jsonl (record): give one"),
        ("--output a.svg --output b.SVG", "are both .svg, .png or .pdf (picture): give one"),
        ("--output read.jsonl", "read.jsonl is read, and would be overwritten"),
        ("--json", "unknown option --json: type --output FILE.jsonl"),
        ("-o", "type --output FILE; FILE ends in .jsonl (record), .svg, .png or .pdf (picture), "),
        ("a.svg", "unexpected argument 'a.svg' (did you mean --output a.svg?)"),
        ("a.txt", "unexpected argument 'a.txt'; python -m writing --help shows"),
    ],
)
def test_files_that_cannot_be_written(words, said):
    with pytest.raises(ConfigurationError) as caught:
        write(words)
    assert said in str(caught.value)


@pytest.mark.usefixtures("writable")
def test_a_folder_is_no_file_and_a_file_is_written_once():
    Path("there").mkdir()
    with pytest.raises(ConfigurationError, match="there is a directory: expected the name of"):
        outputs.check_outputs((Output(Path("there"), RECORD),))
    with pytest.raises(ConfigurationError, match="a is named twice as --output"):
        outputs.check_outputs((Output(Path("a"), RECORD), Output(Path("a"), outputs.TABLE)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("count = 3\nshare = 1\non = true\nkind = 'square'",
         {"count": 3, "share": 1.0, "on": True, "kind": "square"}),
        ("size = 3", "x.toml: unknown key 'size' (hint size)"),
        ("count = 0", "x.toml: count: expected an integer >= 1, found '0'"),
        ("share = 1" + 400 * "0", "x.toml: share: the number is too large"),
        ("on = 1", "x.toml: on: expected true or false, found 1 (int)"),
        ("share = true", "x.toml: share: expected a number, found True (bool)"),
        ("kind = 'squar'", "found 'squar' (did you mean square?)"),
        ("kind", "config: x.toml: "),
        (None, "config: cannot read x.toml: No such file or directory"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("writable")
def test_values_in_toml(text, expected):
    if text is not None:
        Path("x.toml").write_text(text)
    fields = {each.name: each for each in list_fields(Writing)}
    try:
        found = toml.read(Path("x.toml"), fields, lambda key: f" (hint {key})")
    except ConfigurationError as error:
        assert expected in str(error)
    else:
        assert found == expected
        assert (
            toml.write({**found, "share": None})
            == text.replace("'", '"').replace("share = 1\n", "") + "\n"
        )


@pytest.mark.parametrize(
    ("word", "choices", "near"),
    [
        ("--lr", ("--seed", "--learning-rate"), "--learning-rate"),
        ("--learn", ("--seed", "--learning-rate"), "--learning-rate"),
        # One letter is no abbreviation of a single word, and two are no beginning.
        ("--s", ("--seed",), None),
        ("--se", ("--several-things-at-once",), None),
    ],
)
def test_what_was_meant(word, choices, near):
    assert checks.find_near(word, choices) == near


def test_numbers_and_references():
    assert checks.positive("s", zero=True)("0") == 0 and checks.positive("s")("1e-9") == 1e-9
    for text in ("0", "-1", "1e13", "x"):
        with pytest.raises(ValueError, match=r"expected s (> 0|<= 1e12), found "):
            checks.positive("s")(text)
    assert checks.is_positive(0.5)
    assert not any(map(checks.is_positive, (0.0, float("inf"), float("nan"))))
    assert len(checks.quote("x" * 78)) == 80 and checks.quote("x" * 79).endswith("...")
    checks.check_reference("model", "package.module:Class.method", ["mlp"])
    checks.check_reference("model", "mlp", ["mlp"])
    with pytest.raises(ConfigurationError, match=r"expected one of mlp, package\.module:"):
        checks.check_reference("model", "a/b:c", ["mlp"])
    with pytest.raises(ConfigurationError, match="kind: expected text without broken characters"):
        checks.check_text(Writing(kind="\udcff"), "kind")


def test_what_cannot_be_used_is_left_out(tmp_path, capfd):
    def read_number(path: Path) -> int:
        if not path.exists() or not path.read_text():
            raise ConfigurationError(f"{path.name} is empty")
        return int(path.read_text())

    for name, text in (("good", "1"), ("bad", ""), ("worse", "")):
        (tmp_path / name).write_text(text)
    good, bad, worse, gone = (tmp_path / name for name in ("good", "bad", "worse", "gone"))
    assert checks.read_usable([bad, good], read_number) == [1]
    assert "left out: bad is empty" in capfd.readouterr().err
    with pytest.raises(ConfigurationError, match="gone is empty"):
        checks.read_usable([good, gone], read_number)
    with pytest.raises(ConfigurationError, match="bad is empty, and 1 more"):
        checks.read_usable([bad, worse], read_number)
