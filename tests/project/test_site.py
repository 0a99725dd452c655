"""The site: made without a warning, its links lead somewhere, and it needs no network."""

import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import browser
import documents
import launchers
import mpiddp
from mpiddp import errors, models, training

DEADLINE = 300
LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}
"""What a page loads by itself."""
OF_STYLES = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")


class Page(HTMLParser):
    """What one page has: ``names`` that links can lead to, ``links``, and what it ``loads``."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names, self.links, self.loads = set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.names.add(values.get("id"))
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag in LOADED:
            self.loads.add(values.get(LOADED[tag]) or "")


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """Where README's command has made the site; each warning is an error."""
    [command] = re.findall(r"`python (-m sphinx [^`]*) site`", documents.README.read_text("utf-8"))
    folder = tmp_path_factory.mktemp("site")
    words = (*shlex.split(command), folder, "-W", "--keep-going", "-q")
    launchers.execute(sys.executable, *words, timeout=DEADLINE, cwd=launchers.ROOT).expect(0)
    return folder


@pytest.fixture(scope="session")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def find_lost(pages: dict[Path, Page]) -> list[str]:
    """The links that lead nowhere; those to other places are not followed."""
    lost = []
    for path, page in pages.items():
        for link in page.links | page.loads:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            other = (path.parent / unquote(address.path)).resolve() if address.path else path
            names = pages[other].names if other in pages else set()
            if not other.is_file() or (address.fragment and unquote(address.fragment) not in names):
                lost.append(f"{path.name}: {link}")
    return lost


def test_each_link_leads_somewhere(pages):
    assert len(pages) > len(documents.CHAPTERS)
    assert find_lost(pages) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="x"><a href="#x"><a href="#y"><img src="b.svg">')
    lost = find_lost({path: Page(path) for path in tmp_path.glob("*.html")})
    assert sorted(lost) == ["a.html: #y", "a.html: b.svg"]


def test_no_page_loads_anything_from_the_network(site, pages):
    assert [load for page in pages.values() for load in page.loads if "//" in load] == []
    styles = {path.name: path.read_text("utf-8") for path in site.rglob("*.css")}
    assert styles
    assert not [name for name, text in styles.items() if OF_STYLES.search(text)]


def test_the_reference_has_each_public_name(site, pages):
    names = pages[site / "docs/api.html"].names
    for module in (mpiddp, training, errors, models):
        wanted = {f"{module.__name__}.{name}" for name in module.__all__}
        assert wanted - names <= {"mpiddp.errors", "mpiddp.training"}
        assert f"module-{module.__name__}" in names
    text = (site / "docs/api.html").read_text("utf-8")
    assert not re.search(r"<blockquote|\b(Args|Attributes|Raises)\b[^<]*:<", text)


WIDTH = 390
LOOKS = """return {
  wide: document.documentElement.scrollWidth,
  blank: [...document.images].filter((image) => !image.naturalWidth).map((image) => image.src),
  loaded: performance.getEntriesByType("resource").map((each) => each.name),
}"""


@pytest.mark.browser
def test_a_narrow_dark_window_shows_each_page_and_finds_words(site, pages, tmp_path):
    if obstacle := browser.find_obstacle():
        pytest.skip(obstacle)
    with browser.start(tmp_path) as driver:
        browser.resize(driver, WIDTH)
        browser.emulate(driver, {"prefers-color-scheme": "dark"})
        page = browser.Page(driver, tmp_path)
        for path in pages:
            page.visit(path.as_uri())
            looks = page.run(LOOKS)
            assert looks["wide"] <= WIDTH, path
            assert not looks["blank"], path
            assert not [each for each in looks["loaded"] if not each.startswith("file:")], path
        assert browser.complaints(driver) == []
        page.visit((site / "search.html").as_uri() + "?q=preemption")
        page.wait(lambda: "Slurm" in page.texts("#search-results li a"))
