"""Algorithms of your own: a Python file or a plan joins those that are here."""

import shutil
from pathlib import Path

import pytest

from mpiddp.errors import ConfigurationError, MpiddpError, ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.plans import loading
from own_algorithm import STAR

pytestmark = pytest.mark.usefixtures("own_registry")

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
