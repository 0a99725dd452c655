"""``python -m mpiddp checkpoints`` and ``export``: what is there, and its plain weights."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mpiddp
from launchers import run_python
from mpiddp.checkpoints.__main__ import show
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage.manifest import MANIFEST
from mpiddp.errors import CheckpointError, ConfigurationError
from mpiddp.export import USUAL_NAME, export
from mpiddp.training.step.moving_average import MovingAverage
from saves import METADATA, SHARD, flip, write


def read(path: Path, capsys: pytest.CaptureFixture[str], *, is_quick: bool = False) -> list[str]:
    """The rows, with single spaces."""
    show(path, is_quick=is_quick)
    owner, head, *rows = capsys.readouterr().out.splitlines()
    assert re.search(r"/checkpoints: run 'a' \(.*since ", owner)
    assert head.split() == ["checkpoint", "written", "size", "ranks", "score", "attempt", "state"]
    return [" ".join(row.split()) for row in rows]


WRITTEN = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+ KiB 1"


def test_each_checkpoint_has_its_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, 30, score=0.75, attempt="attempt-2")
    rows = read(folder, capsys)
    assert re.fullmatch(rf"step-30 {WRITTEN} 0.75 attempt-2 valid", rows[0])
    assert re.fullmatch(rf"step-2 {WRITTEN} attempt-1 valid", rows[1])
    assert re.fullmatch(rf"step-1 {WRITTEN} attempt-1 valid", rows[2])
    assert read(folder.parent, capsys) == rows
    assert read(folder / "step-2", capsys) == [rows[1]]


def test_what_is_damaged_or_unfinished_says_so(folder, capsys):
    write(folder, 3, 4, 5)
    flip(folder / "step-5" / SHARD, 0.5)
    (folder / "step-4" / "more").touch()
    (folder / "step-4" / METADATA).unlink()
    (folder / "step-3" / manifests.MANIFEST).unlink()
    manifests.set_aside(folder / "step-1", ["first", "second"])
    (folder / "step-6.attempt-1.partial").mkdir()
    before = sorted(folder.rglob("*"))
    states = [row.partition(" KiB ")[2] or row.partition(" B ")[2] for row in read(folder, capsys)]
    assert states == [
        f"1 attempt-1 damaged: {SHARD}: has changed",
        "1 attempt-1 damaged: more does not belong to it, and 1 more",
        "damaged: manifest.json is missing", "1 attempt-1 valid", "set aside: first, and 1 more",
        "partial: being written or removed, or left over",
    ]  # fmt: skip
    assert "valid by its files' sizes" in read(folder, capsys, is_quick=True)[0]
    assert sorted(folder.rglob("*")) == before


def test_what_a_job_does_meanwhile_is_no_damage(folder, monkeypatch, capsys):
    list_checkpoints = manifests.list_checkpoints

    def list_and_change(path: Path) -> list[Path]:
        found = list_checkpoints(path)
        shutil.copytree(path / "step-2", path / "step-3")
        shutil.rmtree(path / "step-1")
        return found

    monkeypatch.setattr(manifests, "list_checkpoints", list_and_change)
    valid, gone = read(folder, capsys)
    assert valid.endswith(" valid") and gone == "step-1 ? ? was removed meanwhile"


def test_other_owners_and_formats(folder, monkeypatch, capsys):
    (folder / "owner.json").unlink()
    show(folder, is_quick=False)
    assert capsys.readouterr().out.startswith(f"{folder}: an unknown owner\n")
    other = folder.parent / "other"
    write(other, 7, run="b")
    shutil.copytree(other / "step-7", folder / "step-7")
    shutil.copy(other / "owner.json", folder)
    show(folder, is_quick=False)
    out = capsys.readouterr().out
    assert out.startswith(f"{folder}: run 'b' (on ") and out.count("(of another owner)") == 2
    monkeypatch.setattr(manifests, "FORMAT", 99)
    with pytest.raises(CheckpointError, match="found none"):
        show(folder, is_quick=False)
    assert capsys.readouterr().out.count("has format 2 with xxh3-128, and this mpiddp reads") == 3


def test_where_there_is_none(tmp_path: Path, folder: Path) -> None:
    for path, what in ((tmp_path / "absent", "does not exist"), (folder / "lock", "is no dir")):
        with pytest.raises(ConfigurationError, match=what):
            show(path, is_quick=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"expected a checkpoint in .*empty, found none"):
        show(tmp_path / "empty", is_quick=False)
    # A run whose checkpoints are elsewhere.
    (tmp_path / "empty" / "config.toml").write_text(f'checkpoint_dir = "{folder}"\n')
    show(tmp_path / "empty", is_quick=False)


def test_the_command_needs_no_torch_and_leaves_with_5(folder: Path) -> None:
    program = (
        "import sys; from mpiddp.__main__ import main\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    for path in folder.glob("step-*"):
        (path / METADATA).unlink()
    found = run_python("-c", program, "checkpoints", folder, timeout=160).expect(5)
    assert found.stdout.splitlines()[-1] == "False"
    assert found.stderr == f"mpiddp: expected a valid checkpoint in {folder}, found none\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, MovingAverage]:
    """A script's checkpoints of steps 3 and 4, with a moving average; no test changes them."""
    path = tmp_path_factory.mktemp("script") / "checkpoints"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average = MovingAverage(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with mpiddp.Checkpointer(path, model, optimizer, average=average) as checkpointer:
        for step in (3, 4):
            with torch.no_grad():
                model[0].weight += 1
            average.update(step)
            checkpointer.save(step)
    return path, model, average


def test_the_average_is_written_and_with_raw_the_weights(saved, tmp_path, monkeypatch):
    path, model, average = saved
    monkeypatch.chdir(tmp_path)
    said = export(path.parent, Path(USUAL_NAME), is_raw=False)
    # 8 numbers of each layer in float32, and one int64.
    assert said == f"Weights written: weights-4.pt (step 4 of {path}/step-4: 7 tensors, 72 B)"
    found = torch.load("weights-4.pt", weights_only=True)
    expected = {**model.state_dict(), **average.weights}
    assert list(found) == list(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert not torch.equal(found["0.weight"], model.state_dict()["0.weight"])

    raw = Path("raw.safetensors")
    raw.write_text("what stood there")
    export(path / "step-4", raw, is_raw=True)
    assert all(torch.equal(each, model.state_dict()[name]) for name, each in load_file(raw).items())
    export(path / "step-3", Path("folder") / USUAL_NAME, is_raw=True)
    older = torch.load("folder/weights-3.pt", weights_only=True)
    assert torch.allclose(older["0.weight"], model.state_dict()["0.weight"] - 1)


def test_what_cannot_be_exported_is_refused(saved, tmp_path):
    path, _, _ = saved
    file = tmp_path / "w.pt"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="expected a checkpoint in"):
        export(tmp_path / "empty", file, is_raw=False)
    with pytest.raises(CheckpointError, match=r"step-9 does not exist; in .* there is step-4, st"):
        export(path / "step-9", file, is_raw=False)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match="text is a file: expected a directory"):
        export(tmp_path / "text", file, is_raw=False)
    with pytest.raises(ConfigurationError, match="would be in a checkpoint, which another"):
        export(path, file, path / "step-4" / "w.pt", is_raw=False)
    with pytest.raises(ConfigurationError, match=r"cannot write .*absent/w.pt: No such file"):
        export(path, tmp_path / "absent" / "w.pt", is_raw=False)
    with pytest.raises(CheckpointError, match="absent does not exist"):
        export(tmp_path / "absent", tmp_path / "new" / "w.pt", is_raw=False)
    assert {each.name for each in tmp_path.iterdir()} == {"empty", "text"}
    assert not (path / "step-4" / "w.pt").exists()


def test_a_damaged_checkpoint_is_told_of_and_never_exported(saved, tmp_path):
    path = tmp_path / "checkpoints"
    shutil.copytree(saved[0], path)
    (path / "step-4" / MANIFEST).write_text("{}")
    found = run_python("-m", "mpiddp", "export", ".", timeout=160, cwd=tmp_path).expect(0)
    assert found.stdout.startswith("Weights written: weights-3.pt (step 3 of checkpoints/step-3: ")
    assert found.stderr == (
        "mpiddp: checkpoints/step-4 is damaged (manifest.json is not what was written): step-3 is "
        "taken instead\n"
    )
    with pytest.raises(CheckpointError, match=r"step-4 cannot be used: manifest.json is not what"):
        export(path / "step-4", tmp_path / "w.pt", is_raw=False)


def test_a_weight_that_modules_share_has_one_average(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    average = MovingAverage(model, 0.9)
    with torch.no_grad():
        model[0].weight += 1
    average.update(100)
    with mpiddp.Checkpointer(tmp_path / "c", model, average=average) as checkpointer:
        checkpointer.save(1)
    export(tmp_path / "c", tmp_path / "w.pt", is_raw=False)
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert torch.equal(found["1.weight"], found["0.weight"])
    assert torch.allclose(found["0.weight"], model[0].weight - 0.9)
