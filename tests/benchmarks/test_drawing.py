"""The pictures of a schedule in the terminal and as SVG; the page has tests of its own."""

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

import launchers
from benchmarks.show.drawing.diagram import NAMESPACE, draw_diagram
from benchmarks.show.drawing.holdings import follow, letter, spell
from benchmarks.show.drawing.text import describe
from benchmarks.show.drawing.timeline import draw_timeline, draw_timeline_page
from benchmarks.show.drawing.workflow import COMPUTES, SENDS, TrainingStep
from benchmarks.study import explain
from browser import Page
from mpiddp.errors import ConfigurationError
from mpiddp.schedules.registry import names, parse
from mpiddp.schedules.schedule import MIRROR, Collective


def lines(text: str, ranks: int, **options) -> list[str]:
    return list(describe(parse(text).build(ranks), **options))


def rows_after(text: list[str], title: str) -> list[list[str]]:
    """The cells of the table below the line that begins with ``title``."""
    begin = next(place for place, line in enumerate(text) if line.startswith(title))
    table = [line for line in text[begin:] if line.startswith("rank ")]
    count = len({line.split()[1] for line in table})
    return [line.split()[2:] for line in table[:count]]


def test_ranks_have_letters():
    assert [letter(rank) for rank in (0, 25, 26, 51, 52, 701)] == ["a", "z", "aa", "az", "ba", "zz"]
    spelled = {"·": (), "b": (1,), "a+b+c": (0, 1, 2), "a…d": (0, 1, 2, 3),
               "a+c…f+j": (0, 2, 3, 4, 5, 9)}  # fmt: skip
    for text, ranks in spelled.items():
        assert spell(frozenset(ranks)) == text


def test_the_chain_of_three_workers_is_that_of_the_textbook():
    """a goes to b, a+b to c, and a+b+c comes round: four steps after the start."""
    text = lines("naive-ring", 3)
    assert rows_after(text, "before the first step") == [["a"], ["b"], ["c"]]
    assert rows_after(text, "step 1 of 4") == [["a"], ["a+b*"], ["c"]]
    assert rows_after(text, "step 2 of 4") == [["a"], ["a+b"], ["a+b+c*"]]
    assert rows_after(text, "step 3 of 4") == [["a+b+c*"], ["a+b"], ["a+b+c"]]
    assert rows_after(text, "step 4 of 4") == [["a+b+c"], ["a+b+c*"], ["a+b+c"]]
    assert "\x1b" not in "\n".join(text)
    assert "\x1b[1ma+b*" in "\n".join(lines("naive-ring", 3, colour=True))


def test_a_server_is_named():
    text = lines("central", 3)
    assert "rank 2 serves, and contributes nothing" in text
    assert rows_after(text, "before the first step") == [["a"], ["b"], ["·"]]
    # And nodes, if there are several.
    for nodes, heads in (((3,), []), ((1, 2), ["node 0", "node 1"])):
        text = lines("ring", 3, nodes=nodes)
        assert [each for each in text if each.startswith("node")] == heads * 5


@pytest.mark.parametrize(
    ("width", "cell"), [(200, "a…d*"), (24, "4*"), (14, "█")], ids=["letters", "counts", "shades"]
)
def test_the_detail_depends_on_the_room(width, cell):
    text = lines("direct", 4, width=width)
    table = rows_after(text, "step 1 of 2")
    assert table[0][0].startswith(cell)
    assert max(len(line) for line in text if line.startswith(("rank ", "chunk"))) <= width


@pytest.mark.parametrize("kind", MIRROR, ids=lambda kind: kind.value)
def test_every_collective_ends_where_it_should(kind: Collective):
    """On four ranks: whose buffers are summed, and who has the result."""
    drawn = 0
    for name in names():
        try:
            schedule = replace(parse(name), collective=kind).build(4)
        except ConfigurationError:
            continue
        drawn += 1
        first, *_, last = follow(schedule)
        full = find(read(draw_diagram(schedule, name)), "rect", "full")
        begins = [chunk for rank in range(4) for chunk in first[rank] if chunk]
        ends = [set(last[rank][chunk]) for chunk in range(schedule.chunks)
                for rank in schedule.holders(chunk)]  # fmt: skip
        if kind.gathers:
            assert len(begins) == schedule.chunks and all(len(each) == 1 for each in ends)
            assert len(full) > len(schedule.members) * schedule.chunks
        else:
            assert all(each == set(schedule.members) for each in ends)
            assert len(begins) == len(schedule.members) * schedule.chunks
    assert drawn >= 3


STEPS = [TrainingStep(0.09, (0.02,) * 4, 0.01), TrainingStep(0.09, (0.001,) * 3, 0.0),
         TrainingStep(0.03, (0.5,), 0.01)]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("overlaps", [True, False])
def test_a_step_does_one_thing_of_a_kind_at_a_time_and_each_when_it_can(step, overlaps):
    spans = step.plan(overlaps=overlaps)
    ends = {span.name: span.end for span in spans}
    for lane, total in ((COMPUTES, step.compute + step.update), (SENDS, sum(step.syncs))):
        mine = [span for span in spans if span.lane == lane]
        assert sum(span.end - span.begin for span in mine) == pytest.approx(total)
        assert all(one.end <= other.begin + 1e-12 for one, other in pairwise(mine))
    for number in range(1, len(step.syncs) + 1):
        span = next(span for span in spans if span.name == f"bucket {number}")
        backward = ends[f"backward {number}"] if overlaps else step.compute
        assert span.begin == pytest.approx(max(backward, ends.get(f"bucket {number - 1}", 0.0)))
    assert spans[-1].begin == pytest.approx(max(step.compute, span.end))


def test_a_step_says_what_overlapping_hides():
    # Forward 30 ms, backward 15 ms for each of four buckets, 20 ms for each to go round: the first
    # goes at 45 ms, the last is through at 125 ms.
    text = "\n".join(STEPS[0].describe(100))
    for line in ("modelled           135 ms", "of it hidden     45 ms", "of it exposed    35 ms",
                 "without overlap    180 ms"):  # fmt: skip
        assert line in text
    picture = draw_timeline(STEPS[0], "<step>")
    words = [item.text for item in read(picture).iter(f"{{{NAMESPACE}}}text")]
    assert words.count("bucket 4") == words.count("backward 1") == words.count("update") == 2
    assert "without overlap: 180 ms" in words


def test_the_page_of_a_step_says_what_goes_on(page: Page):
    file = page.folder / "step.html"
    file.write_text(draw_timeline_page(STEPS[0], "<step>"), "utf-8")
    page.visit(file.as_uri())
    # Nothing moves by itself.
    assert page.text("#words").startswith("After 0.00 ms a rank computes forward;")
    assert page.text("#play") == "Play"
    page.run("""const moment = document.querySelector("#moment"); moment.value = 0.5;
        moment.dispatchEvent(new Event("input"))""")
    # Half of 180 ms: the third bucket goes, and backward has just ended.
    expected = "communicates bucket 3; without overlap it communicates bucket 1."
    assert page.text("#words").endswith(expected) and page.text("#play") == "Play"
    page.click("#play")
    page.wait(lambda: "bucket 4" in page.text("#words") or "update" in page.text("#words"))
    assert page.text("#play") == "Pause"


def read(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def find(root: ElementTree.Element, shape: str, kind: str) -> list[ElementTree.Element]:
    return [item for item in root.iter(f"{{{NAMESPACE}}}{shape}") if item.get("class") == kind]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("ranks", [1, 5])
def test_a_diagram_has_an_arrow_for_each_message_and_ends_with_all_letters(name, ranks):
    schedule = parse(name).build(ranks)
    last, everyone = follow(schedule)[-1], frozenset(schedule.members)
    assert all(chunk == everyone for rank in schedule.members for chunk in last[rank])
    root = read(draw_diagram(schedule, f"{name} on {ranks}"))
    transfers = [transfer for step in schedule.steps for transfer in step]
    assert len(find(root, "line", "add")) == 1 + sum(item.reduce for item in transfers)
    assert len(find(root, "line", "copy")) == 1 + sum(not item.reduce for item in transfers)
    width, height = (float(root.get(side)) for side in ("width", "height"))
    for line in root.iter(f"{{{NAMESPACE}}}line"):
        assert all(0 <= float(line.get(key)) <= width for key in ("x1", "x2"))
        assert all(0 <= float(line.get(key)) <= height for key in ("y1", "y2"))


DIAGRAMS = {
    "ring": ["ring", "--ranks", "4"], "central": ["central", "--ranks", "4"],
    "two-level": ["two-level", "--ranks", "6", "--nodes", "2"],
    "reduce": ["reduce", "--ranks", "4"], "workflow": ["training-step", "--ranks", "4"],
    "chain": ["naive-ring", "--ranks", "3"], "ring-of-three": ["ring", "--ranks", "3"],
    "tree": ["binomial-tree", "--ranks", "8"], "doubling": ["recursive-doubling", "--ranks", "8"],
}  # fmt: skip


@pytest.mark.parametrize("name", DIAGRAMS)
def test_the_diagrams_in_the_documentation_are_up_to_date(name, tmp_path, capsys):
    made, kept = tmp_path / "made.svg", f"benchmarks/pictures/{name}.svg"
    explain.main([*DIAGRAMS[name], "--output", str(made)])
    assert made.read_text() == (launchers.ROOT / kept).read_text()
    chapters = [(launchers.ROOT / f"docs/{it}.md").read_text() for it in ("algorithms", "learning")]
    assert f"{' '.join(DIAGRAMS[name])} --output {kept}" in "".join(chapters)
