"""Images in files, in the formats of the real data sets."""

import gzip
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import data_files
import trainings
from mpiddp.errors import ConfigurationError
from mpiddp.launch.session import Session
from mpiddp.training.data import image_data
from mpiddp.training.data.data_sets import Split, load
from mpiddp.training.data.download import fetch
from mpiddp.training.data.samples import Key, Samples
from mpiddp.training.data.vision import import_torchvision
from mpiddp.training.options.config import Configuration
from pool import Pools


def check_images(configuration: Configuration, shape: tuple[int, ...], scale: Any) -> None:
    """The training images are those that were drawn, less a mean, by a deviation."""
    data = load(configuration)
    images, labels = data_files.draw(25, shape)
    inputs, targets, _ = Samples(data.train).read(Key(1, list(range(25))))
    mean, deviation = scale
    expected = (images.reshape(inputs.shape) / 255 - mean) / deviation
    assert np.abs(inputs.numpy() - expected).max() < 1e-5
    assert targets.tolist() == labels
    assert (data.shape, data.classes, len(data.test)) == (inputs.shape[1:], 10, 10)


def test_mnist_is_what_the_files_hold(tmp_path: Path) -> None:
    data_files.write_mnist(tmp_path, train=25, test=10)
    check_images(Configuration(data="mnist", data_dir=tmp_path), (28, 28), (0.1307, 0.3081))


def test_cifar10_is_what_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_files.write_cifar10(tmp_path, monkeypatch, train=25, test=10)
    scale = np.reshape([[0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]], (2, 3, 1, 1))
    check_images(Configuration(data="cifar10", data_dir=tmp_path), (3, 32, 32), scale)


def test_an_image_folder_has_a_class_for_each_directory(tmp_path: Path) -> None:
    data_files.write_images(tmp_path, train=2, test=1)
    data = load(Configuration(data="imagefolder", data_dir=tmp_path, image_size=8))
    assert (data.shape, data.classes, len(data.train), len(data.test)) == ((3, 8, 8), 3, 6, 3)
    inputs, targets, _ = Samples(data.test).read(Key(0, [0, 1, 2]))
    assert targets.tolist() == [0, 1, 2]
    mean, deviation = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    for image, colour in zip(inputs, data_files.COLOURS.values(), strict=True):
        expected = (np.array(colour) / 255 - mean) / deviation
        # Each has some noise, and has gone through JPEG.
        assert np.abs(image.mean(dim=(1, 2)).numpy() - expected).max() < 0.15


@pytest.mark.parametrize("name", ["mnist", "cifar10", "imagefolder"])
def test_augmentation_follows_seed_epoch_and_sample_alone(name, tmp_path, monkeypatch):
    configuration = data_files.provide(name, tmp_path, monkeypatch)
    plain = Samples(load(configuration).train)
    data = load(replace(configuration, augment=True))
    samples = Samples(data.train, seed=3)
    state = torch.get_rng_state()
    together = samples.read(Key(2, [4, 0, 9])).inputs
    assert torch.equal(together[1:2], samples.read(Key(2, [0])).inputs)
    assert not torch.equal(together, samples.read(Key(3, [4, 0, 9])).inputs)
    assert not torch.equal(together, Samples(data.train, seed=4).read(Key(2, [4, 0, 9])).inputs)
    # What the model draws does not depend on it.
    assert torch.equal(torch.get_rng_state(), state)
    original = plain.read(Key(2, [4, 0, 9])).inputs
    assert together.shape == original.shape and not torch.equal(together, original)
    assert torch.equal(plain.read(Key(3, [4, 0, 9])).inputs, original)
    # Test samples stay as they are.
    tests = [Samples(each.test).read(Key(0, [0, 1])).inputs for each in (data, load(configuration))]
    assert torch.equal(*tests)


def test_only_images_that_may_be_mirrored_are_flipped(tmp_path, monkeypatch):
    data_files.write_mnist(tmp_path)
    data_files.write_cifar10(tmp_path, monkeypatch)
    flips = {}
    for name in ("mnist", "cifar10"):
        train = load(Configuration(data=name, data_dir=tmp_path, augment=True)).train
        assert isinstance(train, Split) and train.augment is not None
        image = torch.zeros(train.features.shape[1:], dtype=torch.uint8)
        image[..., : image.shape[-1] // 2] = 255
        torch.manual_seed(0)
        varied = [train.augment(image) for _ in range(20)]
        flips[name] = any(each[..., -8:].sum() > each[..., :8].sum() for each in varied)
        assert len({each.numpy().tobytes() for each in varied}) > 1
    assert flips == {"mnist": False, "cifar10": True}


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_missing_and_damaged_files_are_told_with_the_command_that_fetches_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = image_data.KINDS[name].loader
    command = f"python -c \"from torchvision.datasets import {loader}; {loader}('{tmp_path}', "
    with pytest.raises(ConfigurationError, match="found nothing there") as caught:
        load(Configuration(data=name, data_dir=tmp_path))
    assert command in str(caught.value)
    configuration = data_files.provide(name, tmp_path, monkeypatch)
    files = sorted(tmp_path.glob("*/**/*-images-*")) or sorted(tmp_path.glob("*/data_batch_3"))
    whole = files[-1].read_bytes()
    for cut in (len(whole) // 2, 0):
        files[-1].write_bytes(whole[:cut])
        with pytest.raises(ConfigurationError, match="damaged or not complete") as caught:
            load(configuration)
        assert command in str(caught.value) and "\n" not in str(caught.value)
    files[-1].unlink()
    with pytest.raises(ConfigurationError, match="damaged or not complete"):
        load(configuration)


def refuse_apart(session: Session, folder: Path, *words: str) -> str:
    """As `trainings.refuse`, where each rank is in its own directory, ``rank-N``."""
    os.chdir(folder / f"rank-{session.world.rank}")
    return trainings.refuse(session, *words)


def test_all_ranks_refuse_what_one_of_them_does_not_find(pool: Pools, tmp_path: Path) -> None:
    ranks, words = pool("openmpi", 2), ["--data", "imagefolder", "--data-dir", "data"]

    def refuse() -> str:
        called: Any = ranks.call(refuse_apart, tmp_path, *words)
        assert called.output == "" and len(set(called.values)) == 1, called
        said: str = called.values[0]
        assert said.startswith("2: ") and "\n" not in said
        return said

    first, second = (tmp_path / f"rank-{rank}" / "data" for rank in range(2))
    for each in (first, second):
        each.parent.mkdir()
    assert refuse().startswith("2: data_dir: expected images as data/train/CLASS/IMAGE")
    data_files.write_images(first)
    said = refuse()
    assert said.startswith("2: data_dir: expected images as data/train/CLASS/IMAGE")
    assert said.endswith("(on 1 of 2 ranks, the first of them rank 1)")
    data_files.write_images(second)
    for split in ("train", "val"):
        (second / split / "red").rename(tmp_path / f"red-{split}")
    said = refuse()
    assert "number of classes of the data set imagefolder must be the same on all ranks" in said
    assert said.endswith("rank 0 has 3, rank 1 has 2")
    assert not [*tmp_path.glob("**/runs")]


def test_an_image_folder_that_is_not_one_is_refused(tmp_path: Path) -> None:
    configuration = Configuration(data="imagefolder", data_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"expected images as .*train/CLASS/IMAGE"):
        load(configuration)
    data_files.write_images(tmp_path)
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "crimson")
    with pytest.raises(ConfigurationError, match=r"the same classes .*: crimson, red$"):
        load(configuration)
    (tmp_path / "val" / "crimson").rename(tmp_path / "val" / "red")
    (tmp_path / "val" / "white").mkdir()
    with pytest.raises(ConfigurationError, match="white"):
        load(configuration)


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    data_files.write_images(tmp_path)
    path = tmp_path / "train" / "green" / "3.jpg"
    path.write_bytes(path.read_bytes()[:300])
    samples = Samples(load(Configuration(data="imagefolder", data_dir=tmp_path)).train)
    batch, problem, _ = samples[Key(1, [2, 11])]
    assert batch is None
    assert "training sample 11 cannot be read" in str(problem) and str(path) in str(problem)


def test_the_digest_of_a_folder_sees_names_sizes_and_first_bytes(tmp_path: Path) -> None:
    data_files.write_images(tmp_path, train=3, test=1)
    configuration = Configuration(data="imagefolder", data_dir=tmp_path)
    path = tmp_path / "train" / "red" / "2.jpg"
    whole = path.read_bytes()
    digests = [load(configuration).digest()]
    path.write_bytes(whole + b"x")
    digests.append(load(configuration).digest())
    path.write_bytes(b"x" + whole[1:])
    digests.append(load(configuration).digest())
    path.write_bytes(whole)
    assert load(configuration).digest() == digests[0]
    path.rename(path.with_name("22.jpg"))
    digests.append(load(configuration).digest())
    assert len(set(digests)) == 4
    # Checkpoints hold it: names, labels, then each size and the first bytes.
    path.with_name("22.jpg").write_bytes(b"x")
    names, labels = torch.tensor(list(b"red/22.jpg"), dtype=torch.uint8), torch.tensor([5])
    files = image_data.ImageFiles(tmp_path / "train", names, torch.tensor([10]), labels, str)
    content = b"red/22.jpg" + (5).to_bytes(8, "little") + b"1x"
    assert files.digest() == hashlib.sha256(content).digest()


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each file was asked for; they are MNIST's, on the mirror that torchvision asks."""
    data_files.write_mnist(tmp_path / "original")
    served = tmp_path / "served"
    served.mkdir()
    resources = []
    for path in sorted((tmp_path / "original").rglob("*ubyte")):
        packed = gzip.compress(path.read_bytes())
        (served / f"{path.name}.gz").write_bytes(packed)
        resources.append((f"{path.name}.gz", hashlib.md5(packed).hexdigest()))
    found: Counter[str] = Counter()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(served))

        def do_GET(self) -> None:
            found[self.path] += 1
            super().do_GET()

        def log_message(self, *_: Any) -> None: ...

    import_torchvision()
    from torchvision.datasets import MNIST

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(MNIST, "resources", resources)
        yield found
        server.shutdown()


def test_a_data_set_is_fetched_once(requests: Counter[str], tmp_path: Path) -> None:
    # torchvision asks for a file twice: also to see whether it has moved.
    fetch("mnist", tmp_path / "other")
    once = Counter(requests)
    assert len(once) == 4
    target = tmp_path / "data"
    with ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(fetch, "mnist", target) for _ in range(4)]:
            call.result(timeout=60)
    fetch("mnist", target)
    assert requests - once == once
    assert {path.name for path in target.iterdir()} == {"MNIST", ".mnist.lock"}
    same = Configuration(data="mnist", data_dir=tmp_path / "original")
    assert load(Configuration(data="mnist", data_dir=target)).digest() == load(same).digest()


def test_what_was_fetched_in_part_has_no_name(requests, tmp_path, monkeypatch):
    target = tmp_path / "data"
    damaged = tmp_path / "served" / "train-images-idx3-ubyte.gz"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-9])
    with pytest.raises(ConfigurationError, match=r"download: cannot fetch mnist into .*train-im"):
        fetch("mnist", target)
    assert {path.name for path in target.iterdir()} == {".mnist.lock"}
    damaged.write_bytes(whole)
    # Of a process that was killed.
    (target / ".mnist-left" / "MNIST").mkdir(parents=True)
    fetch("mnist", target)
    assert {path.name for path in target.iterdir()} == {"MNIST", ".mnist.lock"}
