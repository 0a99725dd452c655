"""Short trainings by other libraries: python frameworks.py accelerate|lightning|transformers FOLDER

Rank 0 prints the module of the default group's class, and a digest of the trained weights.
"""

import hashlib
import sys

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, RATE = 3, 8, 0.05


class Model(nn.Module):
    """Whose output is a loss, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs, labels):
        return {"loss": ((self.layers(inputs) - labels) ** 2).mean()}


def make_data():
    inputs = torch.randn(64, 8)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train_with_accelerate(model, data, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    loader = DataLoader(data, BATCH)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(wrapped(inputs, labels)["loss"])
            optimizer.step()


def train_with_lightning(model, data, folder):
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            loss = self.model(*batch)["loss"]
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), RATE)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=2, strategy=strategy, **quiet)
    trainer.fit(Module(), DataLoader(data, BATCH))


def train_with_transformers(model, data, folder):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, learning_rate=RATE,
        use_cpu=True, report_to=[], save_strategy="no", ddp_backend="gloo", disable_tqdm=True,
    )  # fmt: skip
    samples = [{"inputs": inputs, "labels": labels} for inputs, labels in data]
    Trainer(model, arguments, train_dataset=samples).train()


def main() -> None:
    name, folder = sys.argv[1:]
    torch.manual_seed(0)
    model = Model()
    {
        "accelerate": train_with_accelerate,
        "lightning": train_with_lightning,
        "transformers": train_with_transformers,
    }[name](model, make_data(), folder)
    if distributed.get_rank() == 0:
        weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        kind = type(distributed.group.WORLD).__module__
        print(f"trained {kind} {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
