"""The command that runs the tests of GPUs."""

from __future__ import annotations

import sys

import pytest

import launchers

NAMES = ("device", "programs", "ranks", "training")


def run_script(*arguments: str, **variables: str) -> launchers.Result:
    words = ("bash", launchers.ROOT / "tests" / "gpu.sh", *arguments)
    variables = {"MPIDDP_PYTHON": sys.executable, **variables}
    return launchers.execute(*words, env=variables, timeout=150)


def test_without_a_gpu_there_is_one_line():
    answer = run_script(CUDA_VISIBLE_DEVICES="").expect(0)
    assert (answer.stdout, answer.stderr) == ("", "mpiddp: no GPU: nothing was run\n")


@pytest.mark.long
def test_with_a_gpu_the_machine_and_each_test_are_named(tmp_path):
    fake = "import torch.cuda as cuda\ncuda.device_count = lambda: 1\n"
    fake += "cuda.get_device_name = lambda index: 'NVIDIA H200'\n"
    (tmp_path / "sitecustomize.py").write_text(fake)
    report = tmp_path / "report.txt"
    answer = run_script(
        "--collect-only", "-qq", PYTHONPATH=str(tmp_path), MPIDDP_GPU_REPORT=str(report)
    )
    assert answer.returncode == 0, answer
    assert "mpiddp: 1 x NVIDIA H200, torch " in answer.stderr
    listed = [line for line in answer.stdout.splitlines() if "::" in line]
    names = {line.split("::")[0] for line in listed}
    assert names == {f"tests/gpu/test_gpu_{name}.py" for name in NAMES}
    assert not [line for line in listed if "cpu" in line]
    written = report.read_text()
    assert "on 1 x NVIDIA H200, torch " in written.splitlines()[0]
    assert all(line in written for line in listed)
