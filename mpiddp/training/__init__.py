"""The training floor: configuration, data, model, trainer.

``config`` and ``registry`` import neither torch nor numpy, so that ``--help`` stays quick.
"""
