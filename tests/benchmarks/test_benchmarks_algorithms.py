"""The commands that prove, explain, simulate and price algorithms, as a user calls them."""

import itertools
import re
import shlex
import sys

import pytest

import documents
import launchers
import wrong_algorithms
from benchmark_runs import check_drawing, record_benchmark
from benchmarks.measure.collectives.measurement import QUANTITIES
from benchmarks.measure.training_step.contenders import QUANTITY as STEP
from benchmarks.records import machines, options
from benchmarks.records.schema import read_record
from benchmarks.study import explain, numerics, prices, prove, simulate
from benchmarks.study import fastest as winners
from mpiddp.errors import ConfigurationError, ScheduleError
from mpiddp.schedules import registry
from mpiddp.schedules.cost import Phase, split
from mpiddp.schedules.schedule import Transfer, all_reduce


@pytest.fixture
def registered(own_registry):
    """A way to register an algorithm for one test."""

    def register(name, make, phases=lambda nodes, each: None):
        registry.register(name, phases)(make)

    return register


def test_everything_that_is_registered_is_proved_in_several_processes(tmp_path):
    path = tmp_path / "proof.jsonl"
    printed, record = record_benchmark(path, "prove", "--ranks", "5", "--processes", "2")
    *verdicts, _ = record.others
    assert [verdict["algorithm"] for verdict in verdicts] == list(registry.names())
    for verdict in verdicts:
        # Four segmentations of each number of ranks.
        assert verdict["schedules"] >= 4 * (6 - verdict["fewest"]) and verdict["failures"] == []
    for line in printed.splitlines()[1:-2]:
        assert line.endswith("proved")


def forget_the_way_back(n):
    """Rank 0 has the sum, and keeps it."""
    return all_reduce(n, 1, [[Transfer(rank, 0, 0, 1, True) for rank in range(1, n)]])


def test_a_wrong_algorithm_is_found_by_being_registered(registered, capsys):
    registered("forgetful", forget_the_way_back)
    with pytest.raises(ScheduleError, match="8 schedules"):
        prove.main(["--ranks", "3", "--processes", "1"])
    text = capsys.readouterr().out
    assert "forgetful, 2 ranks, 1 segment: at the end rank 1's sum of chunk 0 lacks rank 0" in text
    table = {line.split()[0]: line for line in text.splitlines()}
    assert table["forgetful"].endswith("8 WRONG")
    assert table["ring"].endswith("proved")


def test_a_choice_is_proved_in_its_segments_and_from_as_few_ranks_as_it_can_have(capsys):
    prove.main(["ring", "--ranks", "4", "--segments", "7", "--processes", "1"])
    _, row, total = capsys.readouterr().out.splitlines()
    # Three schedules of each number of ranks: seven segments, and the halves.
    assert row.split() == ["ring", "1–4", "12", row.split()[3], "proved"]
    assert total.startswith("all")
    prove.main(["direct:servers=3", "central:servers=3", "--ranks", "6", "--processes", "1"])
    _, colocated, dedicated, *_ = capsys.readouterr().out.splitlines()
    assert colocated.split()[:2] == ["direct:servers=3", "3–6"]
    assert dedicated.split()[:2] == ["central:servers=3", "4–6"]
    with pytest.raises(ConfigurationError, match="2 ranks can have 1 to 2 colocated servers"):
        prove.main(["direct:servers=3", "--ranks", "2"])
    usual = f"For each number of ranks from 1 to {prove.parse_options([]).ranks} this proves"
    assert usual in (launchers.ROOT / "docs/algorithms.md").read_text()


def test_numbers_of_ranks_that_it_is_not_made_for_are_listed(registered, capsys):
    def make(n):
        if n & (n - 1):
            raise ConfigurationError("powers of two only")
        return registry.find("ring").make(n)

    registered("powers", make)
    prove.main(["powers", "--ranks", "9", "--processes", "1"])
    out = capsys.readouterr().out
    assert "proved" in out and "powers is not made for 3, 5–7, 9 ranks" in out


def test_each_algorithm_comes_with_its_variants():
    cases = prove.list_cases([registry.parse("direct"), registry.parse("two-level")], 6, None)
    assert ("direct:servers=2", 6) in {(case.choice, case.ranks) for case in cases}
    assert {case.nodes for case in cases if case.ranks == 6} == {None, (4, 2)}


@pytest.mark.parametrize(
    "begin",
    [
        lambda: explain.main(["double", "--ranks", "3", "--segments", "2"]),
        lambda: explain.main(["ring", "--ranks", "3", "--beside", "double", "--output", "a.html"]),
        lambda: simulate.main(["ring", "double", "--ranks", "3", "--ranks-per-node", "2"]),
        lambda: numerics.main(["double", "--ranks", "3"]),
        lambda: QUANTITIES["allreduce"].parse(["--algorithms", "double", "--ranks", "3"]),
        lambda: STEP.find_launcher(STEP.parse(["--sync", "double", "--ranks", "3"])),
    ],
    ids=["explain", "page", "simulate", "numerics", "allreduce", "training-step"],
)
def test_what_is_no_all_reduce_is_refused_by_every_command(begin, writable, capsys):
    with wrong_algorithms.registered(), pytest.raises(ScheduleError) as caught:
        begin()
    said = "double on 3 ranks is no all-reduce: step 1: the contribution of rank 1 is added twice"
    assert str(caught.value) == said and caught.value.exit_code == 1
    assert capsys.readouterr().out == ""


def test_explain_prints_the_steps_and_the_price(capsys):
    explain.main(["ring", "--ranks", "4", "--bytes", "4K", "--latency", "1", "--bandwidth", "8",
                  "--addition", "1"])  # fmt: skip
    text = capsys.readouterr().out
    assert text.startswith("ring on 4 ranks: Every rank passes one chunk")
    assert "step 6 of 6" in text
    # 6 · 1 µs + 1.5 · 4096 B / (1 GB/s) + 0.75 · 4096 B / (1 GB/s)
    assert "modelled      15.2 µs = 6 α + 1.5 S·β + 0.75 S·γ" in text
    assert "busiest rank  0 sends 6 KiB and receives 6 KiB; all ranks send 24 KiB" in text


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("nodes", [[], ["--nodes", "2"]], ids=["alike", "nodes"])
def test_the_formula_that_is_printed_gives_the_price(name, nodes, capsys):
    """With α 1 s, a byte 1 s on any link and 0.1 s to add, the terms are seconds."""
    machine = ["--latency", "1e6", "--bandwidth", "8e-9", "--addition", "1e-8"]
    near = ["--inside-latency", "1e6", "--inside-bandwidth", "8e-9"]
    size = 4 * 5 * 3 * 64
    explain.main([name, "--ranks", "6", "--bytes", str(size), *machine, *nodes,
                  *(near if nodes or name == "two-level" else [])])  # fmt: skip
    [line] = [line for line in capsys.readouterr().out.splitlines() if "modelled" in line]
    price, sign, formula = line.partition(" = ")
    assert sign or nodes or name == "two-level", "where all links are alike there is a formula"
    weights = {"α": 1, "S·β": size, "S·γ": size / 10}
    terms = (term.split() for term in formula.split(" + ") if sign)
    total = sum(float(factor) * weights[unit] for factor, unit in terms)
    found = float(price.split()[1].replace(",", ""))
    assert not sign or total == pytest.approx(found, rel=1e-3)


def test_a_collective_is_explained_by_its_usual_algorithm_or_another(capsys):
    explain.main(["reduce", "--ranks", "3", "--addition", "1e9", "--latency", "0"])
    text = capsys.readouterr().out
    assert text.startswith("reduce by gather-broadcast on 3 ranks: The first half of this all-")
    assert "  1→0 +0   2→0 +0" in text.replace("\xa0", " ")
    # Two buffers through the root's port of 1.25 GB/s, where one must go.
    assert "modelled      1.68 ms\n" in text and "lower bound   839 µs: " in text
    explain.main(["all-gather", "--by", "direct", "--ranks", "3"])
    text = capsys.readouterr().out
    assert text.startswith("all-gather by direct on 3 ranks: The second half")
    assert "step 1 of 1: 6 messages, 6 copied" in text
    assert "which keeps it; * is new" in text and "adds it" not in text


def test_a_link_shared_by_the_ranks_of_a_node_can_be_quicker_than_one_rank(capsys):
    for bandwidth, factor in (("10", 2), ("40", 1)):
        explain.main(["direct", "--ranks", "4", "--nodes", "2", "--bytes", "10M", "--latency", "0",
                      "--inside-bandwidth", "1000000Tbit/s", "--addition", "1e9",
                      "--node-bandwidth", bandwidth])  # fmt: skip
        text = capsys.readouterr().out
        # Where it has room for one rank alone, it is not named.
        assert (f", {bandwidth} Gbit/s for each node, " in text) == (factor == 1)
        [found] = re.findall(r"modelled +(\S+) ms\b", text)
        # Each way and half, two ranks send half of the buffer to the other node.
        assert float(found) == pytest.approx(factor * 8 * 1.048576, rel=1e-2)


def test_the_first_lines_can_be_looked_at_alone():
    program = f"{shlex.quote(sys.executable)} -m benchmarks explain ring --ranks 40 | head -n 1"
    result = launchers.execute("bash", "-c", program, timeout=160, cwd=launchers.ROOT)
    assert result.stdout.startswith("ring on 40 ranks")
    assert result.stderr == ""


def simulate_record(tmp_path, *arguments):
    path = tmp_path / "prices.jsonl"
    simulate.main([*arguments, "--output", str(path)])
    cells = read_record(path).cells
    return {(each.ranks, each.contender, each.at["bytes"]): each for each in cells}


def test_prices_beyond_the_simulation_are_marked(tmp_path, capsys, monkeypatch):
    record = simulate_record(tmp_path, "ring", "two-level", "--ranks", "8", "65536", "--bytes=1M")
    text = capsys.readouterr().out
    sources = {(ranks, cell.details["source"]) for (ranks, *_), cell in record.items()}
    assert sources == {(8, "simulated"), (65536, "closed form")}
    n = 65536
    exact = 2 * (n - 1) * 10e-6 + 2**20 * (n - 1) / n * (2 / 1.25e9 + 1 / 10e9)
    assert record[n, "ring", 2**20].samples == (pytest.approx(exact, rel=1e-12),)
    assert text.count("~") == 3
    assert "~ is the algorithm's closed form" in text
    grids = []
    monkeypatch.setattr(prices, "write_sheet", lambda *given: grids.append(given[1]))
    simulate.main(["ring", "--ranks", "8", "--output", f"{tmp_path}/a.svg"])
    [[[chart]]] = grids
    # Large buffers take little more than the lower bound, 1 of it.
    assert chart.mark[0] < chart.lines[0].points[1 << 28].median < 1.1 * chart.mark[0]


def test_what_has_no_closed_form_is_said_and_a_registered_one_is_used(registered, tmp_path, capsys):
    registered("mine", lambda n: registry.find("ring").make(n))
    simulate.main(["mine", "ring", "--ranks", "2048"])
    text = capsys.readouterr().out
    assert "mine has no closed form for 2048 ranks on 2048 nodes" in text
    assert [machines.describe_place(n, 1) for n in (1, 4)] == ["1 rank", "4 ranks on 1 node"]
    with pytest.raises(ConfigurationError, match="mine has no closed form"):
        simulate.main(["mine", "--ranks", "2048"])
    registered("own", lambda n: registry.find("ring").make(n), lambda nodes, each: [Phase(1)])
    for cell in simulate_record(tmp_path, "own", "--ranks", "2048").values():
        assert cell.samples == (0.0,)
        assert (cell.details["source"], cell.details["steps"]) == ("closed form", 1)


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("12", 12), ("64K", 65536), ("1m", 1 << 20), ("2GiB", 1 << 31)]
)
def test_sizes_are_read(text, count):
    assert options.size(text) == count
    for other in ("", "K", "-1", "1.5M", "1 M", "1e6"):
        with pytest.raises(ValueError, match="expected bytes, for example"):
            options.size(other)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (0.0123, "12.3 ms"), (12345.6, "12,346 s"), (0.9999e-3, "1 ms"),
     (999.9, "1,000 s"), (1e-9, "0.001 µs")],
)  # fmt: skip
def test_seconds_are_described(seconds, text):
    assert options.describe_seconds(seconds) == text
    assert options.describe_value(-999.9, "GB/s") == "-1,000 GB/s"


def documented_figures():
    """The commands of README and docs/ whose output is the same everywhere, and what follows."""
    blocks = [block for path in documents.DOCUMENTS for block in documents.read_blocks(path)]
    for block, answer in itertools.pairwise(blocks):
        is_shown = (block.language, answer.language) == ("bash", "text")
        words = shlex.split(block.text.replace("\\\n", " ")) if is_shown else []
        if words[:3] == ["python", "-m", "benchmarks"] and words[3] in ("explain", "simulate"):
            yield pytest.param(words[3:], answer, id=f"{words[3]}-{block.line}")


@pytest.mark.parametrize(("words", "answer"), list(documented_figures()))
def test_figures_of_the_documentation_are_of_today(words, answer, tmp_path, monkeypatch, capsys):
    """Its own tests let any number pass."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks/pictures").mkdir(parents=True)
    {"explain": explain, "simulate": simulate}[words[0]].main(words[1:])
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in answer.text.splitlines() if line != "…" and line not in printed] == []


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
    return {name: (lambda size, a=a, b=b: a + b * size) for name, a, b in figures}


def test_winners_change_where_their_lines_cross():
    prices = lines(("few", 1.0, 1.0), ("some", 1001.0, 0.5), ("many", 11001.0, 0.25))
    found = [(each.name, each.low, each.high) for each in winners.find_ranges(prices, (4, 1 << 20))]
    # 1 + s = 1001 + s/2 at 2000 bytes, 1001 + s/2 = 11001 + s/4 at 40000; in whole elements.
    assert found == [("few", 4, 2000), ("some", 2004, 40000), ("many", 40004, 1 << 20)]
    [equal] = winners.find_ranges(lines(("a", 1, 1), ("b", 1, 1)), (4, 64))
    assert equal.name == "a"


def test_a_map_is_shown_drawn_and_written(tmp_path, capsys):
    plot, path = tmp_path / "map.svg", tmp_path / "map.jsonl"
    words = "--latency 5us --bandwidth 100Gbit --ranks-per-node 8"
    simulate.main(["--map", "--ranks", "4", "512", *words.split(),
                   "--output", str(plot), "--output", str(path)])  # fmt: skip
    seen = (
        ">The quickest ", ", 8 ranks on each node<", ">ranks<", ">buffer<", ">1 KiB<", ">1 GiB<",
    )  # fmt: skip
    text, picture = capsys.readouterr().out, check_drawing(plot, *seen)
    # More ranks stand higher, where y is less.
    few, many = (re.search(rf'y="([\d.]+)"[^>]*>{ranks}</text>', picture)[1] for ranks in (4, 512))
    assert float(few) > float(many)
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
    usual, mapped = simulate.parse([]), simulate.parse(["--map"])
    assert "central" not in map(str, mapped.choices)
    assert "central" in map(str, simulate.parse(["--map", "central"]).choices)
    assert "central" in map(str, usual.choices)
    # Powers of two, for which none of them has to fold ranks; --help says from where to where.
    assert all(ranks.bit_count() == 1 for ranks in (*usual.ranks, *mapped.ranks))
    assert (min(mapped.ranks), max(mapped.ranks)) == (2, 65536)
    assert {simulate.PLOTTED_SIZES[0], simulate.PLOTTED_SIZES[-1]} <= {*simulate.SIZES}


def test_regions_are_what_hangs_together():
    rows = [
        winners.FastestRow(2, 2, (winners.Range("a", 4, 64), winners.Range("b", 68, 256))),
        winners.FastestRow(4, 4, (winners.Range("b", 4, 80), winners.Range("a", 84, 256))),
        winners.FastestRow(8, 8, (winners.Range("a", 4, 256),)),
    ]
    regions = [[(at, each.name) for at, each in region] for region in winners.find_regions(rows)]
    assert regions == [[(0, "a")], [(0, "b"), (1, "b")], [(1, "a"), (2, "a")]]
