"""Whatever happens to a training and its directory: what is kept, restored and refused.

Random sequences of saves, restores, kills, errors and damage, with real files and processes, beside
a model of what must be there. `test_owner.py` has other jobs.
"""

import errno
import os
import shutil
import sys
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forked import EndedError, Job, Process, Server
from forked_jobs import READS, WRITES, Rank, Trap
from histories import BODY, OPTIMIZERS, STEPS, History, count_steps, find_world, has_head, is_frozen
from mpiddp.checkpoints.storage import manifest as manifests
from mpiddp.checkpoints.storage.owner import LOCK, OWNER

REFUSED = "ConfigurationError"
FAILED = ("StorageError", "UnwritableError", "WriteError")
ERRORS = st.sampled_from([errno.ENOSPC, errno.EIO, errno.EDQUOT])
READ_ERRORS = st.sampled_from([errno.ESTALE, errno.EIO, errno.EACCES])
CALLS = st.integers(0, 50)
PLACES = st.integers(0, 1 << 16)
"""Taken modulo how many there are."""
WAYS = st.sampled_from(["flip", "truncate", "delete"])
SCORES = st.none() | st.integers(0, 3).map(float)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that must be there."""

    number: int
    """Saves are numbered over all jobs."""
    name: str
    history: History
    score: float | None = None
    damage: str = ""
    """"manifest", "data", or nothing."""


def prune(saved: list[Saved], keep: int) -> list[Saved]:
    """What is left once the oldest that need not be kept are removed; from the oldest on."""
    own = [each for each in saved if each.damage != "manifest"]
    kept = own[-keep:]
    scored = [each for each in own if each.score is not None]
    if scored:
        kept.append(max(scored, key=lambda each: (each.score, each.number)))
    return [each for each in saved if each in kept or each not in own]


def read_tree(path: Path) -> dict[str, bytes | None]:
    """The contents of all files, and None for directories; without the lock."""
    return {
        str(each.relative_to(path)): None if each.is_dir() else each.read_bytes()
        for each in sorted(path.rglob("*"))
        if each.name != LOCK
    }


class Jobs(RuleBasedStateMachine):
    """Jobs of one to three ranks, one after the other."""

    server: Server
    reader: Process
    """Computes twins, and reads checkpoints."""
    twins: dict[tuple[str, History], list[str]]

    @initialize(
        kind=st.sampled_from(sorted(OPTIMIZERS)), keep=st.integers(1, 3), saves=st.integers(0, 3)
    )
    def prepare(self, kind: str, keep: int, saves: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="c-"))
        self.path = self.folder / "checkpoints"
        self.kind, self.keep = kind, keep
        self.saved: list[Saved] = []
        """From the oldest on."""
        self.number, self.attempt = 0, 0
        self.job: Job | None = None
        self.pending: Saved | None = None
        """Of this job, begun and not waited for."""
        self.history: History = ()
        self.start(has_head=False, world=1)
        self.train_and_save(BODY, [None] * saves)

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        if self.job is not None:
            self.kill()
        try:
            if sys.exc_info()[0] is None:
                self.settle()
        finally:
            shutil.rmtree(self.folder)

    # Jobs

    def describe(self, **values: Any) -> Rank:
        self.attempt += 1
        given: dict[str, Any] = {
            "directory": str(self.path), "kind": self.kind, "run": "a", "keep": self.keep,
            "attempt": f"attempt-{self.attempt}", "has_head": False,
        }  # fmt: skip
        return Rank(**{**given, **values})

    def start(self, has_head: bool, world: int) -> None:
        self.job = Job(self.server, self.describe(has_head=has_head, world=world))
        self.history = (f"world-{world}",) if world != 1 else ()
        self.history += ("add",) * has_head
        self.has_looked = self.is_open = self.has_failed = False

    @precondition(lambda self: self.job is None)
    @rule(restores=st.sampled_from([True, True, True, False]), place=PLACES, has_head=st.booleans())
    def begin_again(self, restores: bool, place: int, has_head: bool) -> None:
        self.start(has_head=has_head, world=1 + place % 3)
        if restores:
            self.restore()

    def ask(self, name: str, *arguments: Any) -> list[tuple[Any, ...]]:
        answers = self.job.ask(name, *arguments)
        if name != "restore" and answers[0][0] == "done" and isinstance(answers[0][1], str):
            self.check_digests([each[1] for each in answers])
        return answers

    def check_digests(self, found: list[str]) -> None:
        assert found == self.compute(self.kind, self.history), self.history

    @classmethod
    def compute(cls, kind: str, history: History) -> list[str]:
        if (kind, history) not in cls.twins:
            cls.twins[kind, history] = cls.reader.ask("twin", kind, history)
        return cls.twins[kind, history]

    def kill(self) -> None:
        self.job.kill()
        self.job = None

    # Training

    has_job = precondition(lambda self: self.job is not None)

    def follow(self, event: str) -> None:
        self.history += (event,)
        answers = self.ask("follow", event, count_steps(self.history))
        assert {each[0] for each in answers} == {"done"}

    @has_job
    @rule(event=st.sampled_from([*STEPS, "freeze", "thaw", "slow", "add"]))
    def train(self, event: str) -> None:
        if event != "add" or not has_head(self.history):
            self.follow(event)

    # Saving

    @property
    def may_save(self) -> bool:
        return self.is_open or self.has_looked or not self.list_names()

    def list_names(self) -> list[str]:
        """Of checkpoints, damaged ones among them, as they stand on the disk."""
        found = {each.name for each in self.path.glob("step-*")}
        plain = {each for each in found if each.removeprefix("step-").isdecimal()}
        # What an exchange has left that was cut short.
        replaced = {each for each in found - plain if each.endswith(".replaced")}
        return sorted(plain | {e for e in replaced if e.removesuffix(".replaced") not in plain})

    @property
    def has_aside(self) -> bool:
        return any(self.path.glob("step-*.damaged"))

    def note_save(self, score: float | None) -> Saved:
        self.number += 1
        name = f"step-{count_steps(self.history)}"
        return Saved(self.number, name, self.history, score)

    def add(self, new: Saved) -> list[Saved]:
        """What must be there once ``new`` is."""
        same = (new.name, f"{new.name}.replaced")
        others = [each for each in self.saved if each.name not in same]
        return prune([*others, new], self.keep)

    @has_job
    @rule(score=SCORES)
    def save(self, score: float | None) -> None:
        before = read_tree(self.path) if not self.may_save else None
        if not self.may_save:
            self.check_refused(self.ask("save", *self.arguments(self.note_save(score))), before)
            return
        new = self.note_save(score)
        answers = self.ask("save", *self.arguments(new))
        assert {each[0] for each in answers} == {"done"}, answers
        self.finish_pending()
        self.pending, self.is_open = new, True

    @has_job
    @rule(event=st.sampled_from(STEPS), scores=st.lists(SCORES, min_size=1, max_size=4))
    def train_and_save(self, event: str, scores: list[float | None]) -> None:
        for score in scores:
            self.follow(event)
            self.save(score)
        self.wait()

    def arguments(self, new: Saved) -> tuple[Any, ...]:
        return count_steps(new.history), new.number, new.score

    def finish_pending(self) -> None:
        if self.pending is not None:
            self.saved, self.pending = self.add(self.pending), None

    def check_refused(self, answers: Any, before: dict[str, bytes | None] | None) -> None:
        assert {each[:2] for each in answers} == {("error", REFUSED)}, answers
        assert len({each[2] for each in answers}) == 1 and "\n" not in answers[0][2]
        assert read_tree(self.path) == before

    @has_job
    @rule()
    def wait(self) -> None:
        assert {each[0] for each in self.ask("wait")} == {"done"}
        if self.pending is not None:
            self.finish_pending()
            self.check_names()

    @has_job
    @rule()
    def close(self) -> None:
        assert {each[0] for each in self.ask("close")} == {"done"}
        self.finish_pending()
        self.kill()
        self.check_all()

    # Restoring

    @has_job
    @rule()
    def restore(self) -> None:
        self.restore_with(self.set_traps(0, None))

    @has_job
    @rule(count=st.integers(0, 60), number=READ_ERRORS, is_after=st.booleans(), rank=PLACES)
    def restore_with_an_error_of_reading(self, count, number, is_after, rank):
        self.restore_with(self.set_traps(rank, Trap(READS, count, is_after, number)))

    def set_traps(self, place: int, trap: Trap | None) -> list[Trap | None]:
        """For one of the job's ranks."""
        world = self.job.given.world
        return [trap if rank == place % world else None for rank in range(world)]

    def restore_with(self, traps: list[Trap | None]) -> None:
        answers = self.job.ask_each("restore", [(None, each) for each in traps])
        self.finish_pending()
        valid = [each for each in self.saved if not each.damage]
        if not valid and (self.saved or self.has_aside):
            assert {each[:2] for each in answers} == {("error", "CheckpointError")}, answers
            assert "found damaged ones alone" in answers[0][2]
            return
        assert {each[0] for each in answers} == {"done"}, answers
        self.has_looked = True
        if not valid:
            assert {each[1][0] for each in answers} == {None}
            return
        self.adopt(valid[-1], answers)
        self.note_set_aside(valid[-1])

    def adopt(self, found: Saved, answers: list[tuple[Any, ...]]) -> None:
        """A checkpoint was restored: the history is its own from now on."""
        assert {each[1][0] for each in answers} == {found.number}, (answers, found, self.saved)
        had_head = has_head(self.history)
        self.history = found.history
        if find_world(found.history) != self.job.given.world:
            self.job.ask("seed")
            self.history += (f"world-{self.job.given.world}",)
        if has_head(found.history) != had_head:
            self.history += ("add" if had_head else "leave",)
        self.job.ask("follow", "freeze" if is_frozen(self.history) else "thaw", 0)
        self.check_digests([each[1] for each in self.job.ask("digest")])

    def note_set_aside(self, restored: Saved) -> None:
        """Those that were found to be damaged have gone."""
        names = self.list_names()
        for each in self.saved:
            if each.damage == "data" and each.number > restored.number:
                assert each.name not in names, f"{each} was not set aside"
        self.is_open |= any(each.damage and each.name not in names for each in self.saved)
        assert all(each.name in names for each in self.saved if not each.damage), names
        self.saved = [each for each in self.saved if each.name in names]

    @has_job
    @rule(place=PLACES)
    def restore_a_demanded_one(self, place: int) -> None:
        if self.pending is not None:
            self.wait()
        if not self.saved:
            return
        wanted = self.saved[place % len(self.saved)]
        answers = self.ask("restore", str(self.path / wanted.name), None)
        if wanted.damage:
            assert {each[:2] for each in answers} == {("error", "CheckpointError")}, answers
        else:
            self.adopt(wanted, answers)

    # What goes wrong

    @has_job
    @rule()
    def kill_at_once(self) -> None:
        self.kill()
        self.settle()

    @has_job
    @rule(score=SCORES, count=CALLS, is_after=st.booleans(), rank=PLACES)
    def kill_a_save_at_a_call(self, score, count, is_after, rank):
        if self.may_save:
            with suppress(EndedError):
                self.try_to_save(
                    self.set_traps(rank, Trap(WRITES, count, is_after)), None, self.note_save(score)
                )
        self.kill_at_once()

    @has_job
    @rule(count=st.integers(0, 12), is_after=st.booleans(), rank=PLACES)
    def kill_a_restore_at_a_call(self, count, is_after, rank):
        if self.pending is not None:
            self.wait()
        traps = self.set_traps(rank, Trap(WRITES, count, is_after))
        with suppress(EndedError):
            self.job.ask_each("restore", [(None, each) for each in traps])
        self.kill_at_once()

    def try_to_save(
        self, traps: list[Trap | None], limit: int | None, new: Saved
    ) -> list[tuple[Any, ...]]:
        if self.pending is not None:
            self.wait()
        self.pending = new
        arguments = [(trap, limit, *self.arguments(new)) for trap in traps]
        return self.job.ask_each("save_and_wait", arguments)

    @has_job
    @rule(score=SCORES, count=CALLS, is_after=st.booleans(), number=ERRORS, rank=PLACES)
    def save_with_an_error(self, score, count, is_after, number, rank):
        if self.may_save:
            trap = Trap(WRITES, count, is_after, number)
            self.fail_to_save(self.set_traps(rank, trap), None, self.note_save(score))

    @has_job
    @rule(score=SCORES, limit=st.integers(0, 120_000))
    def save_on_a_full_disk(self, score: float | None, limit: int) -> None:
        if self.may_save:
            self.fail_to_save(self.set_traps(0, None), limit, self.note_save(score))

    def fail_to_save(self, traps: list[Trap | None], limit: int | None, new: Saved) -> None:
        answers = self.try_to_save(traps, limit, new)
        assert len({each[0] for each in answers}) == 1, answers
        self.has_failed = True
        self.settle()
        if answers[0][0] == "done":
            self.is_open = True
            assert new.number in [each.number for each in self.saved]
        else:
            assert len({each[1:] for each in answers}) == 1, answers
            assert answers[0][1] in FAILED, answers

    def settle(self) -> None:
        """Find out what a save has left that did not come to its end."""
        new, self.pending = self.pending, None
        found = self.read_all()
        places = {each: name for name, (each, _) in found.items() if isinstance(each, int)}
        must = self.saved
        if new is not None and new.number in places:
            must, self.is_open = self.add(new), True
        for each in must:
            assert each.damage or each.number in places, f"{each} has gone: {found}"
        # What need not be kept may be there for a while.
        may, self.saved = [*self.saved, *([new] if new else [])], []
        for each in may:
            name = places.get(each.number, "")
            if each.damage:
                names = {*found} - {*places.values()}
                name = next((e for e in (each.name, f"{each.name}.replaced") if e in names), "")
            if name:
                self.saved.append(replace(each, name=name))
        self.check_all()

    @rule(which=PLACES, file=PLACES, place=PLACES, way=WAYS, restores=st.booleans())
    def damage(self, which, file, place, way, restores):
        if self.pending is not None:
            self.wait()
        sound = [each for each in self.saved if not each.damage]
        if not sound:
            return
        each = sound[-1 - which % min(2, len(sound))]
        if (self.path / f"{each.name}.replaced").exists():
            return  # It would be a checkpoint again once this one is set aside.
        files = sorted((self.path / each.name).iterdir())
        self.change(files[file % len(files)], place, way)
        kind = "manifest" if files[file % len(files)].name == manifests.MANIFEST else "data"
        self.saved[self.saved.index(each)] = replace(each, damage=kind)
        if restores and self.job is not None:
            self.restore()

    def change(self, file: Path, place: int, way: str) -> None:
        content = bytearray(file.read_bytes())
        place %= len(content)
        if way == "delete":
            file.unlink()
        elif way == "truncate":
            os.truncate(file, place)
        else:
            content[place] ^= 1 << place % 8
            file.write_bytes(content)

    # Checks

    def check_names(self) -> None:
        """After a save that has succeeded: what is there, and nothing else."""
        assert self.list_names() == sorted(each.name for each in self.saved)
        others = {each.name for each in self.path.iterdir()} - {OWNER, LOCK, *self.list_names()}
        leftover = [each for each in others if each.startswith(("step-", "."))]
        leftover = [each for each in leftover if not each.endswith((".damaged", ".replaced"))]
        assert self.has_failed or not leftover, leftover

    def read_all(self) -> dict[str, tuple[Any, Any]]:
        """The number and digest of each checkpoint, as another training reads it."""
        names = self.list_names()
        given = self.describe(directory=str(self.folder / "other"))
        before = read_tree(self.path) if names else {}
        found = self.reader.ask("read_all", given, [str(self.path / name) for name in names])
        assert not names or read_tree(self.path) == before
        return dict(zip(names, found, strict=True))

    def check_all(self) -> None:
        """Each checkpoint that must be there can be restored."""
        found = self.read_all()
        for each in self.saved:
            number, digest = found[each.name]
            if each.damage:
                assert number == "CheckpointError", (each, number, digest)
                continue
            history = each.history
            if has_head(history):
                history += ("leave",)
            if find_world(history) != 1:
                history += ("world-1",)
            assert (number, digest) == (each.number, self.compute(self.kind, history)[0]), each


MANY = pytest.param(1000, 40, marks=(pytest.mark.long, pytest.mark.timeout(3600)))


@pytest.mark.parametrize(("examples", "steps"), [(8, 20), MANY], ids=["some", "many"])
def test_what_was_saved_is_there_whatever_happens(examples: int, steps: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="f-") as folder,
        closing(Server(Path(folder))) as server,
    ):
        server.wait()
        Jobs.server, Jobs.reader, Jobs.twins = server, Process(server), {}
        try:
            run_state_machine_as_test(
                Jobs,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    # An example takes about a second: to make it smaller would take too long.
                    phases=[Phase.explicit, Phase.reuse, Phase.generate],
                    derandomize=examples < 100,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            Jobs.reader.kill()
