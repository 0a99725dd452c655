"""``--debug``, and torch's debug level that ends ranks."""

import re

import pytest
import torch.distributed as distributed

import launchers
from mpiddp import environment
from mpiddp.launch import debugging

SCRIPT = """
import faulthandler, os, sys, torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(1))
names = ("TORCH_DISTRIBUTED_DEBUG", "NCCL_DEBUG", "MPIDDP_DEBUG")
words = [str(dist.get_debug_level()), *map(os.environ.get, names)]
print(*words, faulthandler.is_enabled(), sys.stdout.line_buffering)
dist.destroy_process_group()
"""
DETAIL = distributed.DebugLevel.DETAIL


@pytest.mark.by_default("openmpi")
def test_variables_are_set_unless_the_user_has_and_detail_is_lowered(either_launcher, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "mpiddp", "--debug", "--debug", "script.py"]
    env = {"NCCL_DEBUG": "WARN", "TORCH_DISTRIBUTED_DEBUG": "detail"}
    result = launchers.run(either_launcher, 2, words, env=env, cwd=tmp_path).expect(0)
    lines = launchers.drop_gloo_lines(result.stdout).splitlines()
    assert lines == ["DebugLevel.INFO INFO WARN 1 True True"] * 2
    [said] = re.findall(r"^mpiddp: --debug sets (.*)$", result.stderr, re.MULTILINE)
    sets, kept = said.split("; already set: ")
    assert kept == "TORCH_DISTRIBUTED_DEBUG=detail NCCL_DEBUG=WARN"
    assert "TORCH_CPP_LOG_LEVEL=INFO" in sets and "NCCL_DEBUG=" not in sets
    assert result.stderr.count("TORCH_DISTRIBUTED_DEBUG=DETAIL is lowered to INFO") == 1
    assert result.stderr.count("[c10d] The debug level is set to ") >= 2


@pytest.fixture
def detail():
    level = distributed.get_debug_level()
    distributed.set_debug_level(DETAIL)
    yield
    distributed.set_debug_level(level)


@pytest.mark.parametrize(
    ("backend", "keep", "lowered"),
    [("gloo", "0", True), ("gloo", "1", False), ("nccl", "0", False)],
)
def test_detail_is_lowered_over_gloo_unless_it_is_kept(
    detail, monkeypatch, capfd, backend, keep, lowered
):
    monkeypatch.setenv(environment.KEEP_DETAIL, keep)
    assert bool(debugging.lower_detail(backend, 0)) == lowered
    assert (distributed.get_debug_level() != DETAIL) == lowered
    assert ("MPIDDP_KEEP_DETAIL=1" in capfd.readouterr().err) == lowered
