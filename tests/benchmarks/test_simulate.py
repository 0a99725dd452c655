"""Simulated machines: described in words, maps of winners; a fitted one is in test_fit.py."""

import pytest

from benchmarks.records import options
from benchmarks.records.schema import read_record
from benchmarks.study import fastest as winners
from benchmarks.study import simulate
from mpiddp.schedules.cost import split

TIME = options.in_words("µs", options.TIMES, zero=True)
RATE = options.in_words("Gbit/s", options.RATES)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [(TIME, "5", 5), (TIME, "5 µs", 5), (TIME, "1.5ms", 1500), (TIME, "2s", 2e6),
     (TIME, "250ns", 0.25), (TIME, "0", 0), (TIME, "1e3us", 1000), (RATE, "100Gbit", 100),
     (RATE, "400 Mbit/s", 0.4), (RATE, "12.5GB", 100), (RATE, "12.5GB/s", 100),
     (RATE, "1Tbit/s", 1000), (RATE, "10Kbit", 1e-5)],
)  # fmt: skip
def test_times_and_rates_are_read(read, text, value):
    assert read(text) == pytest.approx(value)
    for other in ("", "us", "5 parsecs", "5US", "-5us", "5usus", "nan", "inf", "5/s"):
        with pytest.raises(ValueError, match="expected Gbit/s"):
            RATE(other)


def lines(*figures):
    """Prices of algorithms of so many α and β each."""
    return {
        name: (lambda size, a=latency, b=per_byte: a + b * size)
        for name, latency, per_byte in figures
    }


def test_winners_change_where_their_lines_cross():
    prices = lines(("few", 1.0, 1.0), ("some", 1001.0, 0.5), ("many", 11001.0, 0.25))
    found = list(winners.find_ranges(prices, (4, 1 << 20)))
    # 1 + s = 1001 + s/2 at 2000 bytes, 1001 + s/2 = 11001 + s/4 at 40000; in whole elements.
    assert found == [
        winners.Range("few", 4, 2000),
        winners.Range("some", 2004, 40000),
        winners.Range("many", 40004, 1 << 20),
    ]
    [equal] = winners.find_ranges(lines(("a", 1, 1), ("b", 1, 1)), (4, 64))
    assert equal.name == "a"


def test_a_map_is_shown_drawn_and_written(tmp_path, capsys):
    plot, path = tmp_path / "map.svg", tmp_path / "map.jsonl"
    words = "--latency 5us --bandwidth 100Gbit --ranks-per-node 8"
    simulate.main(["--map", "--ranks", "4", "512", *words.split(),
                   "--output", str(plot), "--output", str(path)])  # fmt: skip
    text, picture = capsys.readouterr().out, plot.read_text()
    rows = [line for line in read_record(path).others if line["kind"] == "winners"]
    assert [row["ranks"] for row in rows] == [4, 512]
    for row in rows:
        nodes = split(row["ranks"], row["nodes"])
        machine = simulate.parse(words.split())
        for each in row["ranges"]:
            assert each["name"] in picture and each["name"] in text
            prices = {
                str(choice): form.seconds(each["low"], machine.find_machine(nodes))
                for choice in options.list_algorithms()
                if (form := choice.closed_form(nodes)) is not None
            }
            prices.pop("central")
            assert prices[each["name"]] <= min(prices.values()) * (1 + 1e-6)


def test_what_leaves_a_rank_out_does_not_compete():
    options_ = simulate.parse(["--map"])
    assert "central" not in map(str, options_.choices)
    assert "central" in map(str, simulate.parse(["--map", "central"]).choices)
    assert "central" in map(str, simulate.parse([]).choices)


def test_regions_are_what_hangs_together():
    rows = [
        winners.FastestRow(2, 2, (winners.Range("a", 4, 64), winners.Range("b", 68, 256))),
        winners.FastestRow(4, 4, (winners.Range("b", 4, 80), winners.Range("a", 84, 256))),
        winners.FastestRow(8, 8, (winners.Range("a", 4, 256),)),
    ]
    regions = [
        [(place, each.name) for place, each in region] for region in winners.find_regions(rows)
    ]
    assert regions == [[(0, "a")], [(0, "b"), (1, "b")], [(1, "a"), (2, "a")]]
