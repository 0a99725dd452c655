"""Images of CIFAR-10's shape, with a model that the ranks share (FSDP).

python -m mpiddp -n 2 examples/cifar_fsdp.py

For the real images: data="cifar10", download=True, model="resnet18"; on GPUs precision="bf16".
"""

from mpiddp.training import Trainer

trainer = Trainer(
    data="synthetic",
    shape="3x32x32",
    samples=400,
    model="convnet",
    parallel="fsdp",
    wrap_parameters=10_000,
    epochs=4,
    learning_rate=0.02,
)
trainer.fit()
