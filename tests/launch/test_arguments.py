"""Mistakes in options are worded as the options were typed."""

from __future__ import annotations

import re

import pytest

import launchers
from mpiddp.errors import ConfigurationError
from mpiddp.launch.script import command_line
from mpiddp.options.reader import name_as_typed


@pytest.mark.parametrize(
    ("words", "message", "worded"),
    [
        ("--batch-size 0", "batch_size: expected", "--batch-size: expected"),
        ("--batch_size=0", "batch_size: expected", "--batch_size: expected"),
        ("--epochs 1", "batch_size: expected", "batch_size: expected"),
        ("--batch-size 0", "x.toml: batch_size: expected", "x.toml: batch_size: expected"),
        ("--sync=a", "servers = 2, and sync = 'a': x", "servers = 2, and --sync = 'a': x"),
        ("--size 1", "batch_size: expected, size: x", "batch_size: expected, size: x"),
    ],
)
def test_an_option_is_named_as_it_was_typed(words, message, worded):
    with pytest.raises(ConfigurationError) as caught, name_as_typed(words.split()):
        raise ConfigurationError(message)
    assert str(caught.value) == worded


def test_the_trainer_names_options_and_keys(tmp_path):
    (tmp_path / "x.toml").write_text("batch_size = 0\n")
    expected = "expected 1 or more samples, or auto, found '0'"
    many = ["--data", "toy", "--samples", "8", "--batch-size", "90", "--quiet"]
    share = "expected at most 7, a rank's share of 7 training samples on 1 ranks, found 90"
    for words, said in (
        (["--config", "x.toml"], f"mpiddp: x.toml: batch_size: {expected}"),
        (many, f"mpiddp: --batch-size: {share}"),
    ):
        done = launchers.run_python("-m", "mpiddp.train", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"{said}\n")


def test_the_help_has_a_line_for_every_command():
    listed = re.findall(r"mpiddp (?:\[OPTIONS\] )?([a-z|]+)", command_line.USAGE)
    assert sorted("|".join(listed).split("|")) == sorted(command_line.COMMANDS)
