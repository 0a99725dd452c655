"""torch's own tests of its backends, with backend mpiddp."""

from importlib.metadata import version

import pytest
import torch_suite
from torch_suite import PASSED, Outcome

import launchers

QUICK = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty", "test_all_reduce_coalesced_product",
    "test_monitored_barrier_gloo_rank_0_timeout", "test_monitored_barrier_gloo_subgroup",
    "test_send_recv_any_source", "test_sparse_all_reduce_sum",
)  # fmt: skip
"""One of each kind of test; comparison.py has the collective calls."""
DOCUMENT = launchers.ROOT / "docs" / "about" / "torch-backend-tests.md"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Of the chosen ones, in one run."""
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    names = {each.params.get("name") for each in chosen if each is not None}
    return torch_suite.run("mpiddp", [name for name in QUICK if name in names])


@pytest.mark.parametrize("name", QUICK)
def test_a_test_of_torch_passes(outcomes, name):
    assert outcomes[name] == Outcome(PASSED)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_what_gloo_passes_mpiddp_passes_as_documented():
    gloo, own = torch_suite.run("gloo"), torch_suite.run("mpiddp")
    assert sum(each.kind == PASSED for each in gloo.values()) >= 100
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    release = version("torch").partition("+")[0]
    row = next(line for line in lines if line.startswith(f"| {release} |"))
    for name in torch_suite.find_missed(gloo, own):
        assert f"`{name}`: {own[name].reason}" in row, own[name]
