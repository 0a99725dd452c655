"""The configuration: its three sources, what it refuses, and what it says then."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpiddp
from launchers import run_python
from mpiddp.errors import ConfigurationError
from mpiddp.options.checks import REFERENCE
from mpiddp.options.fields import read_docstrings
from mpiddp.training.options.config import GROUPS, Configuration, parse, to_toml
from mpiddp.training.options.groups.optimisation import LEARNING_RATES
from mpiddp.training.options.groups.registry import DATASETS

WriteToml = Callable[[str], Path]

EXAMPLES: dict[str, Any] = {
    "name": "first", "runs_dir": Path("out/runs"), "data": "toy", "task": "mine:make",
    "download": True, "text": Path("a.txt"), "context": 64, "data_dir": Path("other"),
    "workers": 2, "augment": True, "image_size": 64, "shape": "3x4x5", "samples": 77,
    "model": "mlp", "epochs": 3, "batch_size": 5, "optimizer": "adamw", "learning_rate": 0.25,
    "momentum": 0.5, "weight_decay": 0.001, "last_batch": "drop", "base_batch": 64,
    "schedule": "constant", "warmup_epochs": 1.5, "step_epochs": 2.5, "step_factor": 0.5,
    "clip_norm": 1.5, "ema": 0.99, "label_smoothing": 0.1, "accumulation_steps": 4,
    "precision": "bf16", "parallel": "fsdp", "compile": True, "channels_last": True,
    "activation_checkpointing": True, "wrap_parameters": 1000, "shard_within": "node",
    "cpu_offload": True, "bucket_mb": 2.5, "find_unused_parameters": True, "deterministic": True,
    "seed": 12, "evaluate_every": 2, "sync": "ring:segments=2", "transport": "mpi",
    "wire_dtype": "bfloat16", "overlap": "off", "servers": 3, "server_placement": "dedicated",
    "staleness": "unlimited", "average_every": 8, "straggler": "random=4",
    "on_save_error": "stop", "preempt_signal": "USR1,TERM", "on_nan": "skip",
    "on_bad_sample": "skip", "save_every": "3epochs", "checkpoint_dir": Path("saved"), "keep": 5,
    "resume": "never", "export": Path("a.pt"), "evaluate_only": True, "predict": "a.npy",
    "weights": Path("a.pt"), "weights_prefix": "encoder", "weights_except": "fc.*",
    "backend": "gloo", "devices": "0, 2", "interface": "node1=ib0,node2=eth0",
    "port_range": "4000-4009", "tuning": "a.json", "collectives": "mpiddp", "timeout": 12.5,
    "allow_shared_gpu": True, "lifeline_timeout": 7.5, "stall_timeout": 0.0,
    "site_defaults": "table", "debug": True,
    "bind": "numa", "log_every": 7, "track_network": True, "track": "mlflow", "profile": "all",
    "log_dir": Path("logs"), "console": "0,3-5", "label": True, "quiet": True,
}  # fmt: skip
"""For each field a value that is not the default."""
NEEDED = {
    **dict.fromkeys(("wrap_parameters", "shard_within", "cpu_offload"), ("--parallel", "fsdp")),
    **dict.fromkeys(("step_epochs", "step_factor"), ("--schedule", "step")),
    **dict.fromkeys(("transport", "wire_dtype", "overlap"), ("--sync", "auto")),
    **dict.fromkeys(("servers", "server_placement", "staleness"), ("--sync", "parameter-server")),
    "augment": ("--data", "mnist"),
    "download": ("--data", "mnist"),
    "text": ("--data", "text"),
    "context": ("--data", "text"),
    "image_size": ("--data", "imagefolder"),
    "shape": ("--data", "synthetic"),
    "evaluate_only": ("--weights", "a.pt"),
    "predict": ("--evaluate-only", "--weights", "a.pt"),
    "weights_prefix": ("--weights", "a.pt"),
    "weights_except": ("--weights", "a.pt"),
}
"""Options that have an effect with some others only, and these."""
FIELDS = [field.name for field in dataclasses.fields(Configuration)]
TYPED = [name for name in FIELDS if name != "load"]
"""Those of which a value stands for itself; a file to load has tests of its own."""


@pytest.fixture
def write_toml(tmp_path: Path) -> WriteToml:
    def write(text: str) -> Path:
        path = tmp_path / "options.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def refuse(arguments: list[str]) -> str:
    """Return the one line with which a command line is refused."""
    with pytest.raises(ConfigurationError) as caught:
        parse(arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert not set(message) & set("│╭╰─\x1b")
    return message


@pytest.fixture(scope="module")
def defaults() -> Configuration:
    return parse([])


@pytest.mark.parametrize("field", TYPED)
def test_every_option_is_read_from_the_command_line(field, defaults, write_toml):
    """And from TOML, and as it was resolved."""
    default, more, value = getattr(defaults, field), NEEDED.get(field, ()), EXAMPLES[field]
    configuration = parse([flag(field), *([] if value is True else [str(value)]), *more])
    assert getattr(configuration, field) == value != default
    text = value if isinstance(value, int | float) else str(value)
    path = write_toml(f"{field} = {json.dumps(text)}")
    assert getattr(parse(["--config", str(path), *more]), field) == value
    path.write_text(to_toml(configuration), encoding="utf-8")
    assert parse(["--config", str(path)]) == configuration


@pytest.mark.parametrize("field", FIELDS)
def test_every_option_is_used(field: str) -> None:
    folder = Path(mpiddp.__file__).parent
    rooms = ("training", "launch", "process/streams")
    sources = [path for room in rooms for path in folder.glob(f"{room}/**/*.py")]
    sources.append(folder / "train.py")
    use = re.compile(rf"\b(configuration|options|output)\.{field}\b")
    users = [path for path in sources if use.search(path.read_text())]
    assert [path for path in users if path.name != "config.py"]


def test_the_command_line_wins_over_toml_and_toml_over_defaults(write_toml: WriteToml) -> None:
    path = write_toml("epochs = 3\nseed = 4\nallow_shared_gpu = true\n")
    configuration = parse(["--config", str(path), "--epochs", "9", "--no-allow-shared-gpu"])
    assert parse([f"--config={path}", "--epochs", "9", "--no-allow-shared-gpu"]) == configuration
    assert (configuration.epochs, configuration.seed) == (9, 4)
    assert configuration.allow_shared_gpu is False
    assert configuration.momentum == Configuration().momentum
    odd = 'o"t\\h\ter\n\u2028é\x7f\U0001f600'
    path.write_text(to_toml(parse(["--data-dir", odd])), encoding="utf-8")
    assert parse(["--config", str(path)]).data_dir == Path(odd)


def test_what_is_left_open_is_resolved() -> None:
    for name, source in DATASETS.items():
        assert parse(["--data", name]).model == source.model
    for optimizer, rate in LEARNING_RATES.items():
        assert parse(["--optimizer", optimizer]).learning_rate == rate
    assert parse(["--data", "digits", "--model", "mlp"]).model == "mlp"


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--epochz", "3"], ["unknown option --epochz", "did you mean --epochs?"]),
        (["--lr", "3"], ["--lr is an option of other trainers; for mpiddp, type --learning-rate"]),
        (["--resume"], ["--resume expects a value, auto|never|PATH: Where to start: at the run's"]),
        (["--nproc_per_node=2"],
         ["--nproc_per_node is an option of torchrun; for mpiddp, type -n"]),
        (["--xyzzy"], ["unknown option --xyzzy", "--help"]),
        (["--optimizer", "adam"], ["optimizer: ", "adam", "sgd", "adamw", REFERENCE]),
        (["--devices", "gpu"], ["devices", "auto, cpu, cuda", "'0,2'", "'gpu'"]),
        (["--data", "digit"], ["data", "'digit'", "did you mean digits?", *DATASETS]),
        (["--epochs", "0"], ["epochs", "1 or more", "0"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--learning-rate", "nan"], ["learning_rate", "above 0", "nan"]),
        (["--momentum", "1"], ["momentum", "below 1"]),
        (["--weight-decay", "-0.1"], ["weight_decay", "0 or more"]),
        (["--timeout", "inf"], ["timeout", "inf"]),
        (["--name", "a/b"], ["name", "'a/b'"]),
        (["--name", "a\udcff"], ["name", "broken"]),
        (["--sync", "ring:parts=3"], ["sync", "'parts=3'", "segments=…"]),
        (["--transport", "mpi"], ["transport = 'mpi'", "sync = 'framework'", "--sync ALGORITHM"]),
        (["--weights-prefix", "a"], ["weights_prefix = 'a' needs weights", "--weights FILE.pt"]),
        (["--weights", "a", "--resume", "b"], ["weights = 'a'", "resume = 'b': both say where"]),
        (["--export", "w-{loss}.pt"], ["expected no braces but {epoch} and {step}, in the file's"]),
        (["--export", "b", "--evaluate-only", "--weights", "a"],
         ["export = 'b'", "evaluate_only = true"]),
        (["--data", "mine:make"], ["model = 'auto'", "data = 'mine:make'", "--model"]),
        (["--help", "modle"], ["--help", "'modle'", "did you mean model?", *GROUPS]),
        (["--overlap", "off"], ["overlap", "'off'", "--sync auto"]),
        (["--servers", "2", "--sync", "ring"], ["servers", "2", "--sync parameter-server"]),
        (["--sync", "parameter-server", "--staleness", "-1"], ["staleness", "-1"]),
        (["--track", "neptune"], ["tensorboard, mlflow, wandb", "'neptune'"]),
        (["--sync", "parameter-server", "--transport", "mpi"], ["transport", "--sync auto"]),
        (["--sync", "parameter-server", "--ema", "0.9"],
         ["ema = 0.9", "sync = 'parameter-server'"]),
        (["--sync", "parameter-server", "--clip-norm", "1"], ["clip_norm = 1.0", "give another"]),
        (["--sync", "parameter-server", "--precision", "fp16"], ["'fp16'", "--precision bf16"]),
        (["--parallel", "fsdp", "--sync", "ring"], ["sync = 'ring'", "parallel = 'fsdp'"]),
        (["--parallel", "fsdp", "--sync", "parameter-server"],
         ["sync = 'parameter-server'", "parallel = 'fsdp'", "leave out --sync"]),
        (["--average-every", "0"], ["average_every", "1 or more steps", "0"]),
        (["--average-every", "2", "--parallel", "fsdp"],
         ["average_every = 2", "parallel = 'fsdp'", "--parallel ddp"]),
        (["--average-every", "2", "--sync", "parameter-server"],
         ["average_every = 2", "sync = 'parameter-server'", "give another --sync"]),
        (["--average-every", "2", "--sync", "ring", "--wire-dtype", "bfloat16"],
         ["wire_dtype = 'bfloat16'", "average_every = 2", "leave out one of them"]),
        (["--batch-size", "auto", "--parallel", "fsdp"],
         ["batch_size = 'auto'", "parallel = 'fsdp'", "give a number"]),
        (["--parallel", "none", "--bucket-mb", "5"], ["bucket_mb = 5.0", "parallel = 'none'"]),
        (["--sync", "parameter-server", "--bucket-mb", "5"], ["bucket_mb", "another --sync"]),
        (["--shard-within", "node"], ["shard_within = 'node'", "parallel = 'ddp'"]),
        (["--wrap-parameters", "5"], ["wrap_parameters = 5", "--activation-checkpointing"]),
        (["--parallel", "fsdp", "--cpu-offload", "--clip-norm", "1"],
         ["cpu_offload = true", "clip_norm = 1.0"]),
        (["--bucket-mb", "0"], ["--bucket-mb: expected a number of MB > 0", "'0'"]),
        (["--step-factor", "0.5"], ["step_factor = 0.5", "schedule = 'cosine'"]),
        (["--accumulation-steps", "3"], ["a divisor of batch_size = 16", "found 3"]),
        (["--warmup-epochs", "16"], ["warmup_epochs", "0 to epochs = 15", "16"]),
        (["--straggler", "first=4"], ["straggler", "RANK=FACTOR", "random=4", "'first=4'"]),
        (["--config", "absent.toml"], ["config", "absent.toml", "No such file"]),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_bad_command_line_is_refused(arguments: list[str], fragments: list[str]) -> None:
    message = refuse(arguments)
    assert [fragment for fragment in fragments if fragment not in message] == []


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("epoch = 3", ["unknown key 'epoch'", "did you mean epochs?"]),
        ("config = 'x'", ["unknown key 'config'"]),
        ("max_steps = 3", ["unknown key 'max_steps': --max_steps is an option of other trainers"]),
        ("epochs = 0", ["epochs", "1 or more", "0"]),
        ("allow_shared_gpu = 1", ["allow_shared_gpu", "true or false", "1 (int)"]),
        ("backend = 1", ["backend", "nccl", "1 (int)"]),
        ("epochs = 3\nepochs = 4\n", ["not valid TOML", "line 2"]),
        ("a = " + "[" * 100_000, ["not valid TOML"]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_bad_toml_file_is_refused(text: str, fragments: list[str], write_toml: WriteToml) -> None:
    path = write_toml(text)
    message = refuse(["--config", str(path)])
    assert [fragment for fragment in [str(path), *fragments] if fragment not in message] == []


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_bytes(b"name = '\xff'")
    assert "utf-8" in refuse(["--config", str(path)])


def test_every_option_is_in_one_group_and_has_a_description() -> None:
    names = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    assert sorted(names) == sorted(FIELDS)
    for group in GROUPS.values():
        texts = read_docstrings(group)
        for field in dataclasses.fields(group):
            assert texts[field.name], field.name


@pytest.mark.parametrize("command", ["train", "plot"])
def test_help_imports_nothing_but_the_parser(command: str) -> None:
    # Whatever else it imported, it would wait for; how long it takes, the benchmark of start-up
    # tells (`--help` is one of its contenders).
    program = (
        "import sys, json, runpy\n"
        "before = set(sys.modules)\n"
        f"sys.argv = ['{command}', '--help']\n"
        f"try: runpy.run_module('mpiddp.{command}', None, '__main__', True)\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(json.dumps(sorted(set(sys.modules) - before)))"
    )
    answer = run_python("-c", program).expect(0)
    packages = {name.partition(".")[0] for name in json.loads(answer.stderr)}
    imported = packages - sys.stdlib_module_names
    assert imported == {"mpiddp"}
