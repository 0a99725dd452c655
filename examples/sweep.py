"""Learning rates side by side: a run for each, and one picture of all.

python -m mpiddp -n 2 examples/sweep.py
python -m mpiddp.plot rate-0.2 rate-0.05 rate-0.01 --output sweep.svg

Started again, it goes on where it was: what has finished is not trained again. On a cluster
jobs/sweep.sbatch makes each run a task of a job array.
"""

from mpiddp.training import Trainer

for rate in (0.2, 0.05, 0.01):
    trainer = Trainer(epochs=3, learning_rate=rate, name=f"rate-{rate}")
    trainer.fit()
