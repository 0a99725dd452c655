"""What a parameter may be with each way to train: the right result, or one line before a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import kinds
from mpiddp.errors import ConfigurationError
from mpiddp.training.options.config import Configuration
from mpiddp.training.wrapping.parameters import check_parameters
from pool import Pools

TOY = ("--data", "toy", "--samples", "160", "--epochs", "1")
WAYS: dict[str, tuple[str, ...]] = {
    "framework": TOY,
    "schedule": (*TOY, "--sync", "ring"),
    "served": (*TOY, "--sync", "parameter-server"),
    "averaged": (*TOY, "--sync", "ring", "--average-every", "2"),
    "sharded": (*TOY, "--parallel", "fsdp"),
    "treated": (*TOY, "--optimizer=adamw", "--clip-norm=1", "--ema=0.9", "--on-nan=skip"),
    "searched": (*TOY, "--find-unused-parameters", "--batch-size", "auto"),
}
EQUAL = ("schedule", "served", "sharded")
"""Ways whose result is that of ``framework`` up to rounding."""
GOOD = ("dense", "integer", "frozen", "tied")
"""Kinds that are trained in every way."""
SPARSE = "cannot be combined with parameter odd.weight, which has sparse gradients: make its emb"
COMPLEX = "cannot be combined with parameter odd, which is complex: give --sync framework"
META = "cannot be combined with parameter odd.weight, which is on the device meta, without values"
TYPES = "which is of {} beside others of {}"
LATE = "in no nn.Embedding or nn.EmbeddingBag with sparse=True"
UNUSED = "found none of odd.weight, odd.bias: give --find-unused-parameters, or have the loss de"
REFUSED: dict[str, dict[str, str]] = {
    "sparse": {"schedule": f"sync = 'ring' {SPARSE}", "sharded": f"parallel = 'fsdp' {SPARSE}"},
    "complex": {
        "served": f"sync = 'parameter-server' {COMPLEX}",
        "sharded": TYPES.format("torch.float32", "torch.complex64"),
    },
    "empty": {"sharded": "parameter odd, which has no elements: give --parallel ddp"},
    "mixed": {
        way: TYPES.format("torch.bfloat16", "torch.float32") for way in ("served", "sharded")
    },
    "unused": dict.fromkeys(("framework", "schedule", "treated"), UNUSED),
    # Only in some steps.
    "late": dict.fromkeys(("framework", "schedule", "treated"), UNUSED),
    "meta": dict.fromkeys(WAYS, META),
    "functional": dict.fromkeys(("framework", "schedule", "treated", "searched"), LATE),
}


@pytest.mark.mpi
@pytest.mark.parametrize("kind", [*GOOD, *REFUSED])
def test_every_kind_is_trained_in_every_way_or_refused_in_one_line(
    kind: str, pool: Pools, tmp_path: Path
) -> None:
    # torch's FSDP knows of no sparse gradient, and says so itself.
    ways = {way: WAYS[way] for way in WAYS if (kind, way) != ("functional", "sharded")}
    rows = pool("openmpi", 2).call(kinds.train, kind, ways, cwd=tmp_path).values[0]
    for way, message in REFUSED.get(kind, {}).items():
        said = rows.pop(way)
        assert isinstance(said, str), way
        assert said.startswith("2: ")
        assert message in said
        assert "\n" not in said
        assert kind == "late" or not (tmp_path / "runs" / way).exists()
    for row in rows.values():
        assert isinstance(row, dict), row
    if kind in ("sparse", "functional"):
        # What dense gradients come to.
        (tmp_path / "dense").mkdir()
        plain = {way: WAYS[way] for way in ("framework", "treated", "averaged")}
        dense = pool("openmpi", 2).call(kinds.train, "dense", plain, cwd=tmp_path / "dense")
        for way in plain.keys() & rows.keys():
            compare(rows[way], dense.values[0][way])
    for way in rows.keys() & set(EQUAL):
        if "framework" in rows:
            compare(rows[way], rows["framework"])


def compare(row: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("loss", "test_loss"):
        assert row[name] == pytest.approx(other[name], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "options", "backend", "message"),
    [
        ("complex", {"precision": "fp16"}, "gloo", "precision = 'fp16' cannot be combined with"),
        # An optimizer of one's own is given gradients as they are.
        (
            "sparse",
            {"clip_norm": 1.0, "optimizer": "a:b"},
            "gloo",
            "clip_norm = 1.0 cannot be comb",
        ),
        ("sparse", {}, "nccl", "sync = 'framework' cannot be combined with parameter odd.weight"),
    ],
)
def test_what_torch_does_not_do_with_some_gradients_is_refused(
    kind: str, options: dict[str, Any], backend: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_parameters(kinds.Model(kind, 10, 2), Configuration(**options), backend)
    assert str(raised.value).startswith(message)


def test_fsdp_takes_several_types_in_separate_groups() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8).double())
    check_parameters(module, Configuration(parallel="fsdp", wrap_parameters=30), "gloo")
    with pytest.raises(ConfigurationError, match=r"1\.weight, which is of torch.float64"):
        check_parameters(module, Configuration(parallel="fsdp"), "gloo")


@pytest.mark.mpi
def test_a_trained_run_goes_on_whatever_its_parameters_are(pool: Pools, tmp_path: Path) -> None:
    words = [*TOY, "--save-every", "1steps", "--keep", "9"]
    for kind in ("sparse", "complex"):
        where = tmp_path / kind
        where.mkdir()
        ways = {"whole": words, "cut": [*words, "--resume", "runs/whole/checkpoints/step-1"]}
        rows = pool("openmpi", 2).call(kinds.train, kind, ways, cwd=where).values[0]
        assert rows["cut"]["parameters"] == rows["whole"]["parameters"], kind
