"""The public names: what completion and ``help`` show of them, and that their examples run."""

import contextlib
import functools
import pydoc
import re
import subprocess
import sys

import pytest

import examples
import launchers
import mpiddp


def test_completion_offers_the_public_names_only():
    shown = {name for name in dir(mpiddp) if not name.startswith("_")}
    assert shown == set(mpiddp.__all__)
    assert all(getattr(mpiddp, name).__doc__ for name in shown)


def test_help_shows_each_public_name_and_an_example_of_it():
    texts = {
        module.__name__: pydoc.render_doc(module, renderer=pydoc.plaintext)
        for module in (mpiddp, mpiddp.errors, mpiddp.training, mpiddp.models)
    }
    for name in examples.list_names():
        home, _, last = f"mpiddp.{name}".rpartition(".")
        assert last in texts[home], name
        # Nobody writes these classes: functions return them, and a world is found in a session.
        found_in = {"Ranks": "ranks.", "Session": "session.", "World": "session.world."}
        used = found_in.get(name, rf"mpiddp\.{name}\b|from {home} import .*\b{last}\b")
        found = examples.find_examples(name)
        assert any(re.search(used, example) for example in found), name


def test_a_name_that_is_in_a_module_is_an_error_that_says_which():
    for name in ("errors.PeerLostError", "training.Task"):
        with pytest.raises(AttributeError, match=f"it is mpiddp.{name}$"):
            getattr(mpiddp, name.partition(".")[2])
    with pytest.raises(AttributeError, match=r"type mpiddp\.barrier\(\) .*comm_hook"):
        mpiddp.synchronize  # noqa: B018 - torch's users look for it


def test_the_examples_run(pool, tmp_path):
    left_out = {*examples.STARTS, *examples.CALLS}
    names = [name for name in examples.list_names() if name not in left_out]
    printed = pool("openmpi", 2).call(examples.run, *names, cwd=tmp_path).stdout
    # What an example does not catch would have ended the pool.
    expected = ("my-own is wrong: ", "1 nodes", "shared-memory")
    assert [words for words in expected if words not in printed[0]] == []
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-500"]


def test_the_examples_that_call_ranks_run(pool, monkeypatch):
    ranks = pool("openmpi", 2)._ranks
    found = functools.wraps(mpiddp.ranks)(lambda size: contextlib.nullcontext(ranks))
    monkeypatch.setattr(mpiddp, "ranks", found)
    examples.run(None, *examples.CALLS, ranks=ranks)


def test_the_examples_that_start_a_launch_run():
    result = launchers.run("alone", 1, [examples.__file__])
    assert result.expect(0).stdout == "rank 0 goes on without data\n"


def test_listing_the_names_imports_no_torch_and_the_front_no_decoder():
    program = (
        "import sys, mpiddp; dir(mpiddp); dir(mpiddp.training)\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "import mpiddp.__main__, mpiddp.front.front, mpiddp.train\n"
        "sys.exit('msgspec' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
