"""The trainer's options: a frozen dataclass for each component, in `groups`.

`mpiddp.options` reads them. What an option cannot be combined with stands in `contradictions`.
`mpiddp.training.options.config.Configuration` has them all.

Nothing here imports torch, NumPy or mpi4py before a value needs it.
"""
