"""A small GPT that learns the bytes of a text, which comes with mpiddp.

python -m mpiddp -n 2 examples/small_gpt.py
"""

from mpiddp.training import Trainer

trainer = Trainer(
    data="text",
    model="transformer",
    optimizer="adamw",
    epochs=1,
    evaluate_every=1,
    clip_norm=1.0,
)
trainer.fit()
