"""Data of one's own: the same on every rank, which trains on its part.

python -m mpiddp -n 2 examples/own_data.py
"""

import numpy as np

import mpiddp
from mpiddp.training.data import split_by_hash


def load(seed: int) -> mpiddp.DataSet:
    """Points in a square; which of them lie in a circle?"""
    points = np.random.default_rng(seed).uniform(-1, 1, size=(2000, 2)).astype(np.float32)
    inside = (np.square(points).sum(axis=1) < 0.6).astype(np.int64)
    return split_by_hash(points, inside, classes=2)


trainer = mpiddp.Trainer(mpiddp.Task(data=load), model="mlp", epochs=5, batch_size=8)
trainer.fit()
