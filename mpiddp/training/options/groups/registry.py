"""The data sets and models that can be chosen by name.

An entry refers to a function as ``package.module:function``, so that the names can be listed
and checked without importing numpy or torch. A new data set or model joins the command line,
the trainer and the tests by one line here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSource:
    """Where a data set comes from, and the model that fits it."""

    loader: str
    """Reference to a function ``(Configuration) -> DataSet``."""
    model: str
    """Name of the model taken for ``--model auto``."""


DATASETS: dict[str, DataSource] = {
    "cifar10": DataSource("mpiddp.training.data.image_data:load_cifar10", model="resnet18"),
    "digits": DataSource("mpiddp.training.data.data_sets:load_digits", model="convnet"),
    "imagefolder": DataSource("mpiddp.training.data.image_data:load_images", model="resnet18"),
    "mnist": DataSource("mpiddp.training.data.image_data:load_mnist", model="convnet"),
    "synthetic": DataSource("mpiddp.training.data.data_sets:make_synthetic", model="convnet"),
    "text": DataSource("mpiddp.training.data.text_data:load_text", model="transformer"),
    "toy": DataSource("mpiddp.training.data.data_sets:make_toy", model="mlp"),
}

MODELS: dict[str, str] = {
    "convnet": "mpiddp.training.task.models:convnet",
    "mlp": "mpiddp.training.task.models:mlp",
    "resnet18": "mpiddp.training.task.models:resnet18",
    "resnet50": "mpiddp.training.task.models:resnet50",
    "transformer": "mpiddp.training.task.models:transformer",
}
"""Name to reference of a function ``(shape, classes) -> torch.nn.Module``."""
