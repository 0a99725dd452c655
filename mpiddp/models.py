"""The models of ``python -m mpiddp.train --model NAME``, for example to load exported weights into.

    model = mpiddp.models.convnet()
    model.load_state_dict(weights)  # torch.load("weights.pt", weights_only=True)
    scores = model.eval()(torch.rand(5, 1, 8, 8))

``shape`` is that of one sample: (channels, height, width) for images. Raises ConfigurationError for
one that the model cannot take.
"""

from mpiddp.training.task.models import convnet, mlp, resnet18, resnet50, transformer

__all__ = ["convnet", "mlp", "resnet18", "resnet50", "transformer"]
