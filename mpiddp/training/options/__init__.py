"""The trainer's options: a frozen dataclass for each component, in `groups`.

To add an option, add a field with a docstring to the dataclass of its component, and a check of its
value to ``__post_init__``. The command line, TOML files and ``--help`` know it then. What it cannot
be combined with stands in `contradictions`. `mpiddp.training.options.config.Configuration` has
them all.

Nothing here imports torch, NumPy or mpi4py before a value needs it.
"""
