"""Every page and picture, wide and narrow, light and dark: no text is over another, cut off,
covered, too small or too pale; with many results, and wrong ones."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from test_history import row, write_run

import browser
from benchmarks.records.schema import Cell, open_record
from benchmarks.study import explain
from benchmarks.study import reporting as command
from browser import Page
from launchers import ROOT
from mpiddp import plot
from mpiddp.training.records.history import STAGES
from planted_records import (
    ENVIRONMENT,
    SIZES,
    Planted,
    make_cells,
    make_messages,
    make_pairs,
    write_record,
)

pytestmark = pytest.mark.browser
K = 1 << 10
LONG = "node-with-a-long-name-0001.cluster.example.org"


def make_report(folder: Path, *records: Path) -> Path:
    command.main([*map(str, records), "--output", str(folder / "report.html")])
    return folder / "report.html"


def many_results(folder: Path) -> Path:
    planted = Planted(places=((2, 1), (16, 4), (64, 8)), sizes=SIZES[::3], slow_rank=1)
    steps = [
        Cell(
            quantity="training step", contender=f"contender {number} of several options", ranks=4,
            at={"model": "mlp"}, samples=each.samples, summary=each.summary,
        )
        for number, each in enumerate(make_pairs(4, {}, [8]))
    ]  # fmt: skip
    cells = chain(make_cells(planted), make_messages(), make_pairs(12, {(1, 2): 1.9}), steps)
    return make_report(folder, write_record(folder / "many.jsonl", cells))


def wrong_results(folder: Path) -> Path:
    planted = Planted(places=((4, 2), (8, 2)), sizes=(K, 64 * K, K**2), rounds=5)
    cells = [
        replace(each, details={**each.details, "wrong": 3})
        if each.contender.startswith(("MPI", "mpiddp auto"))
        else each
        for each in make_cells(planted)
    ]
    with open_record(folder / "wrong.jsonl", "planted", ENVIRONMENT, {}) as record:
        for each in cells:
            record.add(each)
        need = f"needs a GPU for each rank, and {LONG} has none"
        record.refuse("all-reduce", "NCCL", need, ranks=8)
        record.fail("all-reduce", "mpiddp two-level, mpi, private", f"rank 3 on {LONG} was lost")
    other = make_cells(replace(planted, seed=2))
    path = write_record(folder / "other.jsonl", other, processor=f"Processor of {LONG}")
    return make_report(folder, folder / "wrong.jsonl", path)


def runs(*names: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        generator = random.Random(1)
        for number, name in enumerate(names):
            rows = [
                row(epoch, samples_per_second=1000.0 + 100 * number, accuracy=1 - 0.5 / epoch,
                    test_loss=2 / epoch, test_accuracy=0.9 - 0.5 / epoch,
                    learning_rate=0.01 / epoch,
                    stages={stage: 0.001 * (1 + generator.random()) for stage in STAGES})
                for epoch in range(1, 11)
            ]  # fmt: skip
            write_run(folder / name, rows)
        page = folder / "curves.html"
        plot.main([*names, "--runs-dir", str(folder), "--output", str(page)])
        return page

    return make


def explained(words: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        explain.main([*words.split(), "--output", str(folder / "explained.html")])
        return folder / "explained.html"

    return make


PAGES = {
    "many results": many_results, "wrong results": wrong_results,
    "many runs": runs(*(f"a-run-with-a-rather-long-name-{number}" for number in range(12))),
    "ring": explained("ring --beside central"),
    "many ranks on nodes": explained("two-level --ranks 32 --nodes 4"),
    "a step of many buckets": explained("training-step --buckets 16 --ranks 8"),
}  # fmt: skip


@pytest.fixture(scope="module", params=PAGES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return PAGES[request.param](tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("width", [390, 1600])
def test_a_page_can_be_read(page: Page, file: Path, width: int) -> None:
    browser.resize(page.driver, width)
    page.visit(file.as_uri())
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    assert list(list_faults(page, width, least=15)) == []
    if page.run("return document.querySelector('#end') !== null"):
        page.choose("latency", -1)
        for key in ("#next", "#end"):
            page.click(key)
            assert list(list_faults(page, width, least=15)) == []


def test_drawings_and_pictures_of_the_documents_can_be_read(page: Page) -> None:
    pictures = sorted((ROOT / "benchmarks/pictures").glob("*.svg"))
    drawn = ["two-level --ranks 12 --nodes 3", "naive-ring --ranks 30"]
    drawn += ["training-step --buckets 16", "training-step --compute 1 --bytes 4K"]
    for words in drawn:
        pictures.append(page.folder / f"{words}.svg")
        explain.main([*words.split(), "--output", str(pictures[-1])])
    found = {path.name: list(list_faults_of(page, path)) for path in pictures}
    assert len(found) > 20 + len(drawn)
    assert {name: faults for name, faults in found.items() if faults} == {}


def list_faults_of(page: Page, picture: Path) -> Iterator[str]:
    """Within its own frame, on a page that is wide enough."""
    text = picture.read_text("utf-8")
    file = page.folder / "picture.html"
    file.write_text(f"<!doctype html><title>Picture</title>{text[text.index('<svg') :]}", "utf-8")
    browser.resize(page.driver, 6000)
    page.visit(file.as_uri())
    yield from list_faults(page, 6000, least=8)


def list_faults(page: Page, width: int, least: int) -> Iterator[str]:
    """In light and in dark; at least so many texts are on the page."""
    # What is seen is what the window shows.
    browser.resize(page.driver, width, page.run("return document.documentElement.scrollHeight"))
    for scheme in ("light", "dark"):
        browser.emulate(page.driver, {"prefers-color-scheme": scheme})
        found = page.run(browser.BOXES)
        assert found["texts"] >= least
        yield from (f"{scheme}: {each}" for each in found["problems"])


FAULTS = """<!doctype html><meta charset=utf-8><title>Faults</title>
<body style='background: #fff; color: #000'>
<p style='margin: 0'>under it</p><p style='margin: -1.2em 0 0'>over another</p>
<p style='width: 3em; overflow: hidden; white-space: pre'>longer than that</p>
<p style='margin-left: 385px; white-space: pre'>far to the right</p>
<div style='position: relative'>seen by none
<i style='position: absolute; inset: 0; background: red'></i></div>
<p style='color: #bbb'>as pale as can be</p><p style='font-size: 5px'>as small as can be</p>
<svg width='90'><text x='60' y='15'>of a picture</text></svg>
<svg><text x='9' y='15'>the first</text><text x='30' y='15'>the second</text></svg>"""


def test_each_fault_is_found(page: Page) -> None:
    file = page.folder / "faults.html"
    file.write_text(FAULTS, "utf-8")
    page.visit(file.as_uri())
    found = list(list_faults(page, 390, least=8))
    words = ("under it", "cut off: “longer", "beyond the page", "covered", "contrast", "px high",
             "cut off: “of", "first” over")  # fmt: skip
    assert [word for word in words if not any(word in each for each in found)] == []
