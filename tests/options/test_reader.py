"""One reader of options: what a dataclass's fields become on a command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import at_least, check, positive
from mpiddp.options.fields import Argument, pick
from mpiddp.options.reader import Reader, name_as_typed, read


@dataclass(frozen=True, kw_only=True)
class Base:
    """What every one has."""

    seed: int = 0
    """Of all 100 % of the numbers."""
    folder: Path | None = None
    """To write to."""


@dataclass(frozen=True, kw_only=True)
class Made(Base):
    """What this one has."""

    names: Annotated[tuple[str, ...], Argument("NAME", is_positional=True)]
    count: Annotated[int, Argument("N", at_least(1, 9), flag="-c")] = 3
    """``How`` many."""
    sizes: Annotated[tuple[int, ...], Argument("BYTES", at_least(0))] = (1, 2)
    """Of buffers."""
    scale: Annotated[float, Argument("X", positive("a number"))] = 1.5
    """Factor (default: as it was)."""
    kind: Literal["round", "square"] = "round"
    """Form."""
    colours: Annotated[tuple[str, ...], Argument(choices=("red", "blue"))] = ("red",)
    """Of it."""
    trace: Annotated[str, Argument("RANKS", bare="0")] = "none"
    """Who writes."""
    quiet: bool = False
    """Say less."""
    secret: Annotated[str, Argument(is_hidden=True)] = ""
    """Not for help."""

    def __post_init__(self) -> None:
        check("seed", self.seed >= 0, "0 or more", self.seed)


def make(words: str) -> Made:
    return read(Made, words.split(), "python -m made", "Makes.")


WORDS = st.from_regex(r"[a-z]{1,8}", fullmatch=True)


@given(
    st.builds(
        Made, seed=st.integers(0, 1 << 40), folder=st.none() | WORDS.map(Path),
        names=st.lists(WORDS, min_size=1, unique=True).map(tuple), count=st.integers(1, 9),
        sizes=st.lists(st.integers(0), min_size=1, unique=True).map(tuple),
        scale=st.floats(1e-9, 1e12), kind=st.sampled_from(["round", "square"]), trace=WORDS,
        quiet=st.booleans(), secret=WORDS,
    )
)  # fmt: skip
def test_any_options_come_back_from_a_command_line(made):
    words = [*made.names, f"-c={made.count}", "--scale", str(made.scale), f"--kind={made.kind}"]
    words += ["--sizes", *map(str, made.sizes), "--trace", made.trace, "--secret", made.secret]
    words += ["--seed", str(made.seed), *(["--quiet"] if made.quiet else [])]
    words += [] if made.folder is None else ["--folder", str(made.folder)]
    assert read(Made, words, "python -m made", "Makes.") == made


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("a", "sizes", (1, 2)), ("a a b", "names", ("a", "b")), ("a -c4", "count", 4),
        ("a --trace --quiet", "quiet", True), ("a --folder None", "folder", Path("None")),
        ("a --seed 1 --seed 2", "seed", 2), ("-- --a_b", "names", ("--a_b",)),
    ],
)  # fmt: skip
def test_what_is_given_counts_and_the_rest_has_its_default(words, name, value):
    assert getattr(make(words), name) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: NAME; python -m made --help shows the options"),
        ("a --seed x", "--seed: expected an integer, found 'x'"),
        ("a --sizes", "--sizes expects a value, BYTES"),
        ("a --scale nan", "--scale: expected a number > 0, found 'nan'"),
        ("a --seed -1", "--seed: expected 0 or more, found -1"),
        ("a --scale -1e3", "--scale: expected a number > 0, found '-1e3'"),
        ("a --quiet=true", "--quiet takes no value, found 'true'"),
        ("a -c 0", "-c: expected an integer >= 1, found '0'"),
        ("a -c 10", "-c: expected an integer <= 9, found '10'"),
        ("a --kind squar", "--kind: expected one of round, square, found 'squar'"),
        ("a --seed", "--seed expects a value, N: Of all 100 % of the numbers"),
        ("a --kind", "--kind expects a value, one of round, square"),
        ("a --sed_ 3", "unknown option --sed_ (did you mean --seed?)"),
        ("a --secre 3", "unknown option --secre (did you mean --seed?)"),
        ("a --xyz", "unknown option --xyz; python -m made --help shows the options"),
        ("a --no-quiet", "unknown option --no-quiet (did you mean --quiet?)"),
    ],
)  # fmt: skip
def test_a_mistake_says_what_was_expected_and_found(words, message):
    with pytest.raises(ConfigurationError) as caught:
        make(words)
    assert str(caught.value).startswith(message)


def test_help_says_all_that_the_dataclass_says(capsys):
    with pytest.raises(SystemExit) as caught:
        make("--help")
    assert not caught.value.code
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "usage: python -m made NAME… [OPTION …] Makes.",
        "--seed N Of all 100 % of the numbers (default: 0)",
        "-c N How many (default: 3)",
        "--sizes BYTES [BYTES ...] Of buffers (default: 1 2)",
        "--scale X Factor (default: as it was)",
        "--kind {round,square} Form (default: round)",
        "--colours {red,blue} ... Of it (default: red)",
        "--quiet Say less",
    ):
        assert part in shown
    for part in ("secret", "(default: as it was) (", "Say less (default", "What this one has"):
        assert part not in shown


def test_groups_are_shown_alone_and_flags_taken_back(capsys):
    reader = Reader(
        program="made", description="Makes.", groups={"base": Base, "made": Made},
        without=("names", "seed", "folder"), has_negations=True, has_group_help=True,
        explain=lambda option: "ask them" if option == "--theirs" else None,
    )  # fmt: skip
    values = reader.read(["--quiet", "--no-quiet", "-c", "5"])
    assert values == {"quiet": False, "count": 5}
    assert Reader(program="p", description="", groups={"base": Base}, has_negations=True).read(
        ["--folder", "None"]
    ) == {"folder": None}
    assert pick(Base, values) == Base()
    with pytest.raises(ConfigurationError, match="ask them"):
        reader.read(["--theirs"])
    with pytest.raises(SystemExit):
        reader.read(["--help", "made"], show_help=True)
    assert "--kind" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        reader.read(["--help", "base"], show_help=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "message", "worded"),
    [
        ("--batch-size 0", "batch_size: expected", "--batch-size: expected"),
        ("--batch_size=0", "batch_size: expected", "--batch_size: expected"),
        ("--batch-size 0", "x.toml: batch_size: expected", "x.toml: batch_size: expected"),
        ("--sync=a", "servers = 2, and sync = 'a': x", "servers = 2, and --sync = 'a': x"),
        ("--size 1", "batch_size: expected, size: x", "batch_size: expected, size: x"),
    ],
)
def test_an_option_is_named_as_it_was_typed(words, message, worded):
    with pytest.raises(ConfigurationError) as caught, name_as_typed(words.split()):
        raise ConfigurationError(message)
    assert str(caught.value) == worded
