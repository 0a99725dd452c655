"""Large pages under private buffers: which get them, when, and that nothing else changes."""

import mmap
import platform
import re
from pathlib import Path

import pytest
import torch

from crews import Crew
from launchers import until
from mpiddp.collectives.planner import CallRequest
from mpiddp.collectives.transport import single_copy
from mpiddp.collectives.transport.single_copy import COMES_BACK, LEAST, PAGE, LargePages, collapse
from mpiddp.schedules.schedule import Collective

KERNEL = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
WELCOME = "always [madvise] never\n"


def make_buffer(size: int) -> torch.Tensor:
    return torch.arange(size // 8, dtype=torch.int64)


def count_large_bytes(tensor: torch.Tensor) -> int:
    """Bytes of large pages in the mappings that the tensor lies in."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(found[1], 16) < end and int(found[2], 16) > begin
        elif is_inside and line.startswith("AnonHugePages:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.fixture
def collapsed(monkeypatch, tmp_path):
    """The sizes of the buffers whose pages would be changed, on a system that welcomes that."""
    setting = tmp_path / "enabled"
    setting.write_text(WELCOME)
    monkeypatch.setattr(single_copy.is_welcome, "__defaults__", (setting,))
    found: list[int] = []
    monkeypatch.setattr(single_copy, "collapse", lambda address, size: found.append(size))
    return found


def test_a_large_buffer_is_changed_once_when_it_comes_back(collapsed):
    """By any view; each part is one; and a small one is left alone."""
    visitor, buffer, small = LargePages(), make_buffer(LEAST), make_buffer(LEAST - 8)
    for visit in range(1, 3 * COMES_BACK):
        visitor.visit(buffer.view(-1, 8) if visit % 2 else buffer)
        visitor.visit(small)
        assert collapsed == ([LEAST] if visit >= COMES_BACK else [])
    for half in [*make_buffer(2 * LEAST).chunk(2)] * COMES_BACK:
        visitor.visit(half)
    assert collapsed == [LEAST] * 3


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_calls_visit_private_buffers_alone(kind, collapsed):
    crew = Crew([0, 0])
    requests = [CallRequest(Collective.ALL_REDUCE, operator=name) for name in ("sum", "max", "min")]

    def part(rank, communicator):
        tensor = torch.ones(LEAST // 4)
        if kind == "shared":
            tensor = communicator.shared_memory.empty((LEAST // 4,), torch.float32).fill_(1)
        for request in requests[:COMES_BACK]:
            communicator.run(request, tensor)

    crew.run(part)
    # Any plan's calls are visits.
    assert collapsed == (2 * [LEAST] if kind == "private" else [])


def test_other_memory_at_the_same_address_is_not_the_same_buffer(collapsed):
    visitor, addresses = LargePages(), set()
    for _ in range(4 * COMES_BACK):
        buffer = make_buffer(LEAST)
        addresses.add(buffer.data_ptr())
        visitor.visit(buffer)
        del buffer
    assert len(addresses) < 4 * COMES_BACK, "no address was used again"
    assert collapsed == []


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(WELCOME, True), ("[always] madvise never\n", True), ("always madvise [never]\n", False)],
)
def test_an_administrator_who_wants_none_gets_none(setting, expected, tmp_path):
    file = tmp_path / "enabled"
    assert not single_copy.is_welcome(file)
    file.write_text(setting)
    assert single_copy.is_welcome(file) is expected


def test_the_contents_stay_and_the_pages_become_large():
    buffer = make_buffer(4 * PAGE)
    before = buffer.clone()
    if KERNEL < (6, 1) or not single_copy.SETTING.exists():
        pytest.skip(f"Linux {platform.release()} collapses no pages on demand")
    # As long as on x86, and with pages of 4 KiB on other processors.
    if mmap.PAGESIZE == 4096:
        assert int(single_copy.SETTING.with_name("hpage_pmd_size").read_text()) == PAGE
    # The kernel refuses if a page is in use for a moment.
    until(lambda: collapse(buffer.data_ptr(), 4 * PAGE), "large pages")
    # Wherever it begins, three of its four lie in it as a whole.
    assert count_large_bytes(buffer) >= 3 * PAGE
    assert torch.equal(buffer, before)
    assert not collapse(buffer.data_ptr(), PAGE - 8)
