"""The floor under every start-up: a process that imports torch and leaves."""

import torch  # noqa: F401 - importing is all that it does
