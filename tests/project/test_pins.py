"""A change of structure leaves what mpiddp produces as it was."""

import pytest
from test_config import EXAMPLES

import pins

REWRITE = "PYTHONPATH=tests/support:tests/programs:tests/training python tests/support/pins.py"


@pytest.mark.parametrize("kind", ["programs", "commands", "configurations"])
def test_what_is_produced_is_what_was_recorded(kind):
    before = pins.read()[kind]
    now = dict(
        {
            "programs": pins.list_programs,
            "commands": pins.list_commands,
            "configurations": lambda: pins.list_configurations(EXAMPLES),
        }[kind]()
    )
    changed = sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    )
    assert not changed, f"changed on purpose? then run {REWRITE}, and say why: {changed}"
