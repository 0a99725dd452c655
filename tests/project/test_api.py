"""The public names: what completion, ``help`` and docs/api.md show of them."""

from __future__ import annotations

import pydoc
import subprocess
import sys

import api
import launchers
import mpiddp


def test_the_documentation_of_the_interface_is_up_to_date():
    text = (launchers.ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert text == api.describe(), "python tests/support/api.py > docs/api.md"


def test_completion_offers_the_public_names_only():
    shown = {name for name in dir(mpiddp) if not name.startswith("_")}
    assert shown == set(mpiddp.__all__)
    assert all(getattr(mpiddp, name).__doc__ for name in shown)


def test_help_shows_each_public_name_and_each_function_an_example():
    text = pydoc.render_doc(mpiddp, renderer=pydoc.plaintext)
    for name in mpiddp.__all__:
        assert name in text, name
        if not isinstance(getattr(mpiddp, name), type):
            assert f"    {name}(" in text or f"mpiddp.{name}(" in getattr(mpiddp, name).__doc__
            assert f"mpiddp.{name}(" in getattr(mpiddp, name).__doc__, name


def test_listing_the_names_imports_no_torch():
    program = "import sys, mpiddp; dir(mpiddp); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
