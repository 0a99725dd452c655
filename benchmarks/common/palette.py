"""The colours of lines."""

from __future__ import annotations

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
"""Okabe and Ito's, which are told apart by colour-blind eyes, too."""
