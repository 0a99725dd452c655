"""Options as fields of frozen dataclasses, and one reader of them: command lines, TOML, help.

A field's type, default and docstring are the option's; ``__post_init__`` checks its value.
"""
