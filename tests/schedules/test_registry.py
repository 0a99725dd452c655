"""Algorithms by their names with parameters, and of your own: a Python file or a plan joins."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.errors import ConfigurationError, MpiddpError, ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.algorithms import ring
from mpiddp.schedules.cost import flat
from mpiddp.schedules.plans import loading
from mpiddp.schedules.proof import prove
from mpiddp.schedules.schedule import Collective, Transfer, all_reduce, halve, segment
from own_algorithm import STAR
from prices import FULL, WITH_HALVES
from wrong_algorithms import registered

pytestmark = pytest.mark.usefixtures("own_registry")

MACHINE = flat(1.0, 1.0)


def refused(call, *words):
    """The call raises ConfigurationError, in one line that has these words in this order."""
    with pytest.raises(ConfigurationError, match=".*".join(map(re.escape, words))) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_parameters_reach_the_algorithm():
    choice = registry.parse("ring")
    assert (choice.algorithm.name, dict(choice.parameters), choice.segments) == ("ring", {}, 1)
    assert choice.build(5) == choice.build(5, (1, 4)) == ring(5)
    choice = registry.parse("ring:segments=16")
    assert choice.build(5) == segment(ring(5), 16) and not choice.parameters
    assert str(registry.parse("ring:segments=1")) == "ring"
    for text in ("bine", "two-level:outer=ring,inner=pat,segments=2", "swing:variant=latency",
                 "pat:aggregation=7,segments=99", "bine:variant=butterfly"):  # fmt: skip
        choice = registry.parse(text)
        assert str(choice) == text and registry.parse(str(choice)) == choice
    assert registry.parse("direct:servers=2").build(5).owners == (0, 1)
    assert registry.parse("central:servers=2,segments=3").build(5).chunks == 6
    choice = registry.parse("two-level:outer=one-shot,inner=binomial-tree")
    assert choice.parameters == {"outer": "one-shot", "inner": "binomial-tree"}
    # Two steps to the node's first rank, one between nodes, two back.
    assert len(choice.build(8).steps) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ring:servers=2", ["'servers=2'", "ring takes segments=…"]),
        ("ring:segments", ["'segments'", "ring takes segments=…"]),
        ("ring:segments=", ["'segments='", "ring takes segments=…"]),
        ("direct:nodes=2", ["'nodes=2'", "direct takes servers=…, segments=…"]),
        ("two-level:nodes=2", ["'nodes=2'", "takes inner=…, outer=…, segments=…"]),
        ("two-level:inner=x", ["'x'", *registry.names()]),
        ("two-level:outer=x", ["'x'", *registry.names()]),
        ("swing:variant=x", ["variant must be one of bandwidth, latency, found 'x'"]),
        # Which of the two is meant, nobody can know.
        ("ring:segments=2,segments=3", ["segments"]),
        *((text, [f"{text.split(':')[0]!r}", *registry.names()])
          for text in ("", "Ring", " ring", "rings:segments=2")),
        *((f"direct:{key}={value}", [f"{key} must be an integer >= 1, found {value!r}"])
          for key in ("segments", "servers") for value in ("0", "-1", "x", "1.5", "2 ", "²")),
    ],
)  # fmt: skip
def test_an_unknown_key_or_value_is_answered_with_those_there_are(text, words):
    refused(lambda: registry.parse(text), *words)


@pytest.mark.parametrize(
    ("text", "ranks", "nodes", "words"),
    [
        *((name, ranks, None, [f"ranks must be an integer >= 1, found {ranks}"])
          for name in ("ring", "two-level", "central") for ranks in (0, -1)),
        ("direct:servers=9", 8, None, ["8 ranks can have 1 to 8 colocated servers, not 9"]),
        ("central:servers=8", 8, None, ["8 ranks can have 1 to 7 dedicated servers, not 8"]),
        *((f"two-level:inner={name}", 8, None,
           [f"{name} has no halves", "expected one of", *WITH_HALVES])
          for name in registry.names() if name not in WITH_HALVES),
        *((f"two-level:outer={name}", 8, (2, 2, 2, 2),
           [f"{name} ", "cannot be the outer level", "expected one of", *FULL])
          for name in ("central", "two-level")),
        *((name, 4, nodes,
           ["are not 4 ranks: each node has at least one, and together they have all"])
          for name in ("ring", "two-level")
          for nodes in ((), (3,), (2, 3), (4, 0), (5, -1))),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(text, ranks, nodes, words):
    refused(lambda: registry.parse(text).build(ranks, nodes), *words)


@pytest.mark.parametrize("nodes", [(4, 3, 1), (8,) * 256])
@pytest.mark.parametrize(
    "text", ["direct:servers=5000", "two-level:outer=central", "two-level:inner=one-shot"]
)
def test_what_cannot_be_built_has_no_price_for_any_number_of_ranks(text, nodes):
    """The closed form must not answer where the schedule would be refused."""
    choice = registry.parse(text)
    with pytest.raises(ConfigurationError):
        choice.build(sum(nodes), nodes)
    with pytest.raises(ConfigurationError):
        choice.prices([1024], MACHINE, nodes)[0]


def test_a_price_for_each_size():
    for nodes in ((), (0,), (4, 0), (-1, 5), (0, 2000), (-2, -2)):
        for name in ("direct", "two-level"):
            with pytest.raises(ConfigurationError):
                registry.parse(name).prices([1024], MACHINE, nodes)
    choice, nodes = registry.parse("one-shot"), (1, 1)
    prices = choice.prices([4, 40, 0], MACHINE, nodes)
    assert [price.seconds for price in prices] == [5, 41, 0]
    assert choice.prices([40], MACHINE, nodes)[0].seconds == prices[1].seconds
    assert {price.source for price in prices} == {"simulated"}


def test_a_registered_algorithm_is_read_described_and_built():
    @registry.register("mine", lambda nodes, each, depth=1: None)
    def mine(n, depth=1, nodes=None):
        """One sentence, which
        goes on (e.g.this one). Another."""
        return ring(n)

    assert registry.names()[-1] == "mine" and mine(3) == ring(3)
    algorithm = registry.find("mine")
    assert algorithm.parameters == ("depth",) and algorithm.knows_nodes
    assert algorithm.summary == "One sentence, which goes on (e.g.this one)."
    choice = registry.parse("mine:depth=3,segments=2")
    assert choice.build(4, (2, 2)) == segment(ring(4), 2)
    assert choice.closed_form((2, 2)) is None


@pytest.mark.parametrize("made", [None, [], registry.parse("ring").build(5)])
def test_what_is_registered_must_make_schedules_of_as_many_ranks(made, monkeypatch):
    monkeypatch.setattr(registry, "_algorithms", {})
    registry.register("odd")(lambda n: made)
    with pytest.raises(ScheduleError, match="odd on 4 ranks: expected a Schedule of 4 ranks"):
        registry.parse("odd").build(4)


def test_what_is_wrong_is_made_but_not_built():
    with registered():
        for text in ("double", "double:segments=2"):
            choice = registry.parse(text)
            assert choice.make(3).ranks == 3
            for _ in range(2):
                with pytest.raises(ScheduleError) as caught:
                    choice.build(3)
                assert str(caught.value) == (
                    f"{text} on 3 ranks is no all-reduce: step 1: the contribution of rank 1 is "
                    "added twice"
                )
                assert caught.value.exit_code == 1


def test_a_schedule_is_proved_once_for_each_number_of_ranks_and_parameter(monkeypatch):
    proved = []
    monkeypatch.setattr(registry, "prove", lambda one: proved.append(one.ranks) or prove(one))

    @registry.register("mine", lambda nodes, each, servers=1: None)
    def mine(n, servers=1, nodes=None):
        return registry.find("direct").make(n, servers)

    for text in ("mine", "mine:segments=3", "mine:servers=2", "mine:servers=2,segments=2"):
        for ranks in (4, 5, 4):
            registry.parse(text).build(ranks)
    assert proved == [4, 5, 4, 5]
    for nodes in ((2, 2), (1, 3), (2, 2), None):
        registry.parse("mine").build(4, nodes)
    assert proved == [4, 5, 4, 5, 4, 4]
    registry.parse("mine").build(4, (2, 2), (0, 2, 1, 3))
    assert proved[6:] == [4]


def test_what_is_right_on_some_ranks_may_be_wrong_on_others():
    @registry.register("hasty")
    def hasty(n):
        whole = ring(n)
        return replace(whole, owners=(), steps=whole.steps[:6])

    registry.parse("hasty").build(4)
    with pytest.raises(ScheduleError, match="hasty on 5 ranks is no all-reduce: at the end rank"):
        registry.parse("hasty").build(5)


@pytest.mark.parametrize("half", [0, 1])
def test_half_an_all_reduce_is_none(half):
    registry.register("half")(lambda n: halve(ring(n))[half])
    kind = ("reduce-scatter", "all-gather")[half]
    with pytest.raises(ScheduleError, match=f"half on 3 ranks is no all-reduce: .* as a {kind}"):
        registry.parse("half").build(3)


def test_ranks_that_are_placed_otherwise_may_add_in_another_order():
    """Operands are added in the order of the ranks, which depends on what they are called."""

    @registry.register("copied")
    def copied(n):
        # Ranks 3 to 5 have copies; ranks 0 and 3 add all three, and hand on what they have.
        there = [Transfer(rank, rank + 3, 0, 1, False) for rank in range(3)]
        sums = [Transfer(first + rank, first, 0, 1, True) for first in (0, 3) for rank in (1, 2)]
        back = [Transfer(0, 1, 0, 1, False), Transfer(3, 2, 0, 1, False)]
        return all_reduce(n, 1, [there, sums, back], members=[0, 1, 2])

    choice = registry.parse("copied")
    choice.build(6)
    with pytest.raises(ScheduleError, match="hold chunk 0 added in different orders"):
        choice.build(6, order=(0, 1, 2, 3, 5, 4))


def test_halves_are_refused_with_their_real_cause():
    with registered():
        lopsided = registry.parse("lopsided")
        assert lopsided.build(4).owners == (0,)
        said = r"lopsided on 4 ranks cannot be halved: its first 2 of 4 steps are no reduce: "
        with pytest.raises(ScheduleError, match=said):
            lopsided.build_half(Collective.REDUCE, 4)
        with pytest.raises(ScheduleError, match=said):
            registry.parse("two-level:inner=lopsided").build(8)
        with pytest.raises(ScheduleError, match="double on 2 ranks is no all-reduce"):
            registry.parse("double").build_half(Collective.REDUCE, 2)


RECORDED = Path(__file__).parents[1] / "recorded" / "plans"


def write(folder, text, name="own.py"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_function_joins_the_others(star):
    assert loading.load(star) == ("star",)
    assert registry.names()[-1] == "star"
    assert len(registry.parse("star:segments=2").build(4).steps) == 7
    # Once in a process, whoever asks.
    assert loading.load(star) == ("star",)
    assert registry.find("star").source == str(star)


MISTAKES = [
    ("x = 1\n", 'own.py registers no algorithm: expected a function under @register("name")'),
    ("def f(:\n", "own.py:1: SyntaxError: invalid syntax"),
    ("def stop():\n    raise SystemExit(3)\nstop()\n", "own.py:2: SystemExit: 3"),
    (
        STAR.replace('"star"', '"ring"'),
        "own.py:7: ValueError: an algorithm is called 'ring' alread",
    ),
    (STAR + "raise OSError('one\\ntwo')\n", "own.py:12: OSError: one two"),
]


@pytest.mark.parametrize(("text", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_a_file_is_one_line(text, words, tmp_path):
    before = registry.names()
    with pytest.raises(ConfigurationError) as caught:
        loading.load(write(tmp_path, text))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    # Nothing of it stays.
    assert registry.names() == before


BUILDS = [
    ("def own(n):\n    raise ValueError('no\\nluck')", "ValueError: no luck (own.py:6)"),
    ("def own(n):\n    raise ConfigurationError('even only')", "even only"),
    ("def own():\n    pass",
     "TypeError: own() takes 0 positional arguments but 1 was given (own.py:4)"),
    ("def own(n):\n    return all_reduce(n, 1, [(0, 1, 0, 1, 1)])",
     "TypeError: step 0: expected a list of add(…) and copy(…), found (0, 1, 0, 1, 1) (own.py:4)"),
    ("def own(n):\n    return all_reduce(n, 1, [[add(n / 2, 0)]])",
     "TypeError: 'float' object cannot be interpreted as an integer (own.py:4)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), BUILDS, ids=range(len(BUILDS)))
def test_a_mistake_in_a_function_is_one_line(text, words, tmp_path):
    imports = STAR.lstrip().split("\n\n")[0].replace("copy", "copy; from mpiddp.errors import *")
    loading.load(write(tmp_path, f'{imports}\n@register("own")\n{text}\n'))
    with pytest.raises(MpiddpError) as caught:
        registry.parse("own").build(3)
    assert str(caught.value) == f"own on 3 ranks: {words}"


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"expected a name that ends in \.py, \.xml, \.json"
    ):
        loading.load(tmp_path / "own.txt")
    with pytest.raises(ConfigurationError, match="cannot be read: No such file or directory"):
        loading.load(tmp_path / "own.py")


def test_a_plan_joins_the_others_under_the_files_name(tmp_path):
    path = shutil.copy(RECORDED / "msccl_tools_1step_3.xml", tmp_path / "one-step.xml")
    assert loading.load(path) == ("one-step",)
    choice = registry.parse("one-step")
    assert choice.summary == "A plan of another project, on its number of ranks."
    assert len(choice.build(3).steps) == 1
    with pytest.raises(ConfigurationError, match="one-step on 4 ranks: it is a plan for 3 ranks"):
        choice.build(4)


PLANS = [
    ("mscclpp_reduce_tbg.json", "race.json", ScheduleError, "race.json: race: rank 0"),
    ("azure_ag_hier_4_LL.xml", "gather.xml", ConfigurationError, "is no all-reduce: it is an all"),
    ("msccl_tools_1step_3.xml", "ring.xml", ConfigurationError, "called 'ring', which is taken"),
    ("msccl_tools_1step_3.xml", "a b.xml", ConfigurationError, "'a b', which has a space or one"),
]


@pytest.mark.parametrize(("source", "name", "kind", "words"), PLANS)
def test_a_plan_that_cannot_join(source, name, kind, words, tmp_path):
    with pytest.raises(kind) as caught:
        loading.load(shutil.copy(RECORDED / source, tmp_path / name))
    assert words in str(caught.value)


def test_the_contents_tell_two_files_apart(tmp_path):
    first, same, other = (
        loading.find_digest(write(tmp_path, text, name))
        for text, name in ((STAR, "a.py"), (STAR, "b.py"), (STAR + "\n", "c.py"))
    )
    assert first == same != other
