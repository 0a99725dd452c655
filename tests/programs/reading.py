"""What data workers are asked for in tests."""

import os
import signal
import time

import torch

from mpiddp.training.data.samples import Key


class Slow:
    """Samples that say which process has read them; some end it, or cannot be read."""

    def __init__(self, deadly: int = -1, broken: int = -1, longer: int = -1) -> None:
        self.deadly, self.broken, self.longer = deadly, broken, longer

    def __len__(self) -> int:
        return 100

    def __getitem__(self, position: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        if position == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if position == self.broken:
            raise OSError(5, "Input/output error")
        length = 3 if position == self.longer else 2
        return torch.tensor([position, os.getpid()]), torch.rand(length)


def sleep(features: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return features


def list_keys(epoch: int = 1, batches: int = 10) -> list[Key]:
    return [Key(epoch, list(range(4 * each, 4 * (each + 1)))) for each in range(batches)]


def main() -> None:
    """Read with two workers, say who they are, and stay."""
    from mpiddp.training.data.reading import BatchReader, BatchReading
    from mpiddp.training.data.samples import Samples

    reader = BatchReader(Samples(Slow()), BatchReading(workers=2))
    batches = list(reader.read(list_keys()))
    workers = {int(number) for batch in batches for number in batch.inputs[:, 1]}
    print(*workers, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
