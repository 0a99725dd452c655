"""What tests on real GPUs start their jobs with."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

import launchers
from mpiddp.launch.device import nccl
from pool import Pool, Pools

ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}
SEVERAL_ON_ONE = {
    **ONE_GPU,
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # Ranks on one GPU wait for each other inside kernels, which must fit on it together.
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_BUFFSIZE": str(1 << 20),
}
"""Variables with which NCCL works with several ranks on one GPU."""


OVER_GLOO = {**ONE_GPU, "NCCL_MULTI_RANK_GPU_ENABLE": "0"}
"""Variables with which two ranks on one GPU talk over Gloo, be NCCL new enough or not."""
BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True)
class Several:
    backend: str
    launcher: launchers.Launcher
    ranks: int
    variables: Mapping[str, str]


def skip_without_gpu() -> None:
    if not torch.cuda.device_count():
        pytest.skip("no GPU")


@pytest.fixture
def gpu() -> dict[str, str]:
    """The environment in which a job sees one GPU; the test is skipped where there is none."""
    skip_without_gpu()
    return ONE_GPU


@pytest.fixture
def launcher_of_several() -> launchers.Launcher:
    """An MPI that starts several ranks; the test is skipped where there is none."""
    rows = [row for row in launchers.available() if not row.missing()]
    if not rows:
        pytest.skip("no mpirun of the tests' table (tests/support/launchers.py)")
    return rows[0]


def find_several(backend: str, launcher: launchers.Launcher) -> Several:
    """Ranks over NCCL, each with its own GPU, or two on one if NCCL is new enough; or two on one
    over Gloo. The test is skipped where that cannot be."""
    skip_without_gpu()
    if backend == "gloo":
        return Several(backend, launcher, 2, OVER_GLOO)
    if torch.cuda.device_count() > 1:
        return Several(backend, launcher, min(4, torch.cuda.device_count()), {})
    version = nccl.find_version()
    if version < nccl.SHARING_VERSION:
        found = ".".join(map(str, version)) or "none"
        pytest.skip(f"one GPU, and NCCL below 2.30, which refuses two ranks on it (found {found})")
    return Several(backend, launcher, 2, SEVERAL_ON_ONE)


@pytest.fixture(params=BACKENDS)
def several(request: pytest.FixtureRequest, launcher_of_several: launchers.Launcher) -> Several:
    return find_several(request.param, launcher_of_several)


@pytest.fixture
def over_nccl(launcher_of_several: launchers.Launcher) -> Several:
    """For what NCCL alone does on GPUs: its errors, its log, FSDP."""
    return find_several("nccl", launcher_of_several)


@pytest.fixture
def gpu_pool(several: Several, pool: Pools) -> Pool:
    return pool(several.launcher, several.ranks, **several.variables)


@pytest.fixture
def nccl_pool(over_nccl: Several, pool: Pools) -> Pool:
    return pool(over_nccl.launcher, over_nccl.ranks, **over_nccl.variables)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.mpi),
        *(pytest.param(each, marks=pytest.mark.gpu) for each in BACKENDS),
    ]
)
def ranks(request: pytest.FixtureRequest, pool: Pools) -> Pool:
    """Ranks that stay: on CPUs over Gloo, and on GPUs over NCCL and over Gloo."""
    if request.param == "cpu":
        return pool("openmpi", 2)
    found = find_several(request.param, request.getfixturevalue("launcher_of_several"))
    return pool(found.launcher, found.ranks, **found.variables)
