"""Options as fields of frozen dataclasses, and one reader of them: the command line, TOML, help.

Every command line of mpiddp and of its benchmarks is read here. A field's type, default and
docstring are the option's; a check of its value stands in the dataclass's ``__post_init__``.
"""
