"""The training floor: configuration, data, model, trainer.

``options`` imports neither torch nor numpy, so that ``--help`` stays quick.
"""
