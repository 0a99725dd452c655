"""A fit of shaped links, and what it predicts of collectives over them."""

from __future__ import annotations

import itertools

import pytest

from benchmark_runs import record_benchmark
from benchmarks.judge.fit.check import check_record
from benchmarks.judge.fit.fitted import fit_records
from benchmarks.records.statistics import quantile

ALGORITHMS = ("ring", "naive-ring", "halving-doubling", "binomial-tree", "one-shot", "central")


def measure(cluster, path, *words):
    """The record of a benchmark on the cluster."""
    return record_benchmark(path, *words, "--launcher", "srun", **cluster.environment())[1]


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("rate", [100, 400])
def test_collectives_over_shaped_links_come_out_as_they_are_priced(slurm_cluster, tmp_path, rate):
    slurm_cluster.must("rate", f"{rate}mbit")
    try:
        messages = measure(
            slurm_cluster, tmp_path / "messages.jsonl", "point-to-point", "--nodes", "2",
            "--sizes", "16K", "64K", "256K", "1M", "4M", "--repetitions", "3", "--budget", "0.1",
        )  # fmt: skip
        collectives = measure(
            slurm_cluster, tmp_path / "collectives.jsonl", "allreduce", "--nodes", "4",
            "--ranks", "4", "--sizes", "1M", "--algorithms", *ALGORITHMS, "--transports", "mpi",
            "--buffers", "private", "--repetitions", "3",
        )  # fmt: skip
    finally:
        slurm_cluster.must("rate", "none")
    fit = fit_records([messages], None, "float32")
    per_byte = fit.links["network"].segments[-1].seconds_per_byte
    assert per_byte == pytest.approx(8e-6 / rate, rel=0.2)
    checks = [
        check for check in check_record(fit, collectives) if check.cell.details["maker"] == "mpiddp"
    ]
    # The median: a machine with other things to do is late for one or the other.
    assert 0.85 <= quantile([check.ratio for check in checks], 0.5) <= 1.15
    for one, other in itertools.permutations(checks, 2):
        if one.predicted >= 1.5 * other.predicted:
            assert one.cell.summary.median > other.cell.summary.median, (one, other)
