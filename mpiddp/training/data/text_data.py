"""Text as bytes, for a model that predicts the next one."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

from mpiddp.errors import ConfigurationError
from mpiddp.training.data.data_sets import DataSet, Split
from mpiddp.training.options.config import Configuration

VALUES = 256
"""Of a byte: the classes."""


def load_text(configuration: Configuration) -> DataSet:
    """Return a text in pieces of ``context`` bytes; the target of each byte is the next one.

    The last tenth of the text is for testing. Without a file it is a text about collective calls,
    which is written for mpiddp.
    """
    path, length = configuration.text, configuration.context
    if path is None:
        content = (files("mpiddp.training.data") / "text.txt").read_bytes()
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"text: cannot read {path}: {error.strerror}") from None
    if len(content) <= 10 * length:
        raise ConfigurationError(
            f"text: expected more than {10 * length} bytes (ten times --context {length}), found "
            f"{len(content)} in {path}"
        )
    values = np.frombuffer(content, np.uint8)
    # At least one piece, and the byte that follows it.
    tests = max(len(values) // 10, length + 1)
    return DataSet(
        train=_cut(values[:-tests], length), test=_cut(values[-tests:], length), classes=VALUES
    )


def _cut(values: np.ndarray[tuple[int], np.dtype[np.uint8]], length: int) -> Split:
    count = (len(values) - 1) // length
    inputs = values[: count * length].reshape(count, length).copy()
    targets = values[1 : count * length + 1].reshape(count, length).astype(np.int64)
    return Split(inputs, targets, torch.Tensor.long)
