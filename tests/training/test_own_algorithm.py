"""``--load`` in training: an algorithm of your own averages gradients."""

from __future__ import annotations

import types

import pytest

from mpiddp.errors import ConfigurationError
from mpiddp.training.options.config import Configuration, parse, to_toml
from mpiddp.training.preparation import agree
from own_algorithm import STAR


def test_it_is_named_by_sync_and_stands_in_the_configuration(star, tmp_path):
    with pytest.raises(ConfigurationError, match="no algorithm is called 'star'"):
        parse(["--sync", "star"])
    configuration = parse(["--sync", "star:segments=2", "--load", str(star)]).resolve()
    text = to_toml(configuration)
    assert f'load = "{star}"' in text
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert parse(["--config", str(path)]).load == star


@pytest.mark.parametrize("sync", ["framework", "auto", "parameter-server"])
def test_a_file_that_nothing_is_taken_from(star, sync):
    with pytest.raises(ConfigurationError, match="name its algorithm: --sync NAME"):
        Configuration(sync=sync, load=star).resolve()


def test_ranks_agree_on_what_the_file_holds(star):
    """Each rank reads a file of that name; on another node it may be another one."""
    configuration = Configuration(sync="star", load=star).resolve()
    asked = []
    session = types.SimpleNamespace(
        any=bool,
        broadcast=lambda value: value,
        agree=lambda value, what: asked.append((value, what)),
        world=types.SimpleNamespace(size=2),
    )
    agree(configuration, session)
    star.write_text(STAR.replace("owners=[0]", ""))
    agree(configuration, session)
    (first, what), (second, _) = asked
    assert what == f"contents of {star}"
    assert first != second
