"""A change of structure leaves what mpiddp produces as it was."""

import json

import pytest

import pins

REWRITE = "PYTHONPATH=tests/support:tests/programs:tests/training python tests/support/pins.py"


@pytest.mark.parametrize("kind", pins.KINDS)
def test_what_is_produced_is_what_was_recorded(kind):
    before, now = json.loads(pins.RECORD.read_text("utf-8"))[kind], dict(pins.KINDS[kind]())
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    assert not changed, f"changed on purpose? then run {REWRITE}, and say why: {changed}"
