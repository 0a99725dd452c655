"""The configuration: its three sources, what it refuses, and what it says then."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpiddp
from launchers import run_python
from mpiddp.errors import ConfigurationError
from mpiddp.launch.options import LONGEST_TIMEOUT
from mpiddp.options.checks import REFERENCE
from mpiddp.options.fields import read_docstrings
from mpiddp.training.options.config import GROUPS, Configuration, parse, read_toml, to_toml
from mpiddp.training.options.groups.optimisation import LEARNING_RATES
from mpiddp.training.options.groups.registry import DATASETS, MODELS

WriteToml = Callable[[str], Path]

# For each field: a word on the command line that is not the default, the same in TOML, the value.
EXAMPLES: dict[str, tuple[str, str, Any]] = {
    "name": ("first", '"first"', "first"),
    "runs_dir": ("out/runs", '"out/runs"', Path("out/runs")),
    "data": ("toy", '"toy"', "toy"),
    "task": ("mine:make", '"mine:make"', "mine:make"),
    "download": ("", "true", True),
    "text": ("a.txt", '"a.txt"', Path("a.txt")),
    "context": ("64", "64", 64),
    "data_dir": ("other", '"other"', Path("other")),
    "workers": ("2", "2", 2),
    "augment": ("", "true", True),
    "image_size": ("64", "64", 64),
    "shape": ("3x4x5", '"3x4x5"', "3x4x5"),
    "samples": ("77", "77", 77),
    "model": ("mlp", '"mlp"', "mlp"),
    "epochs": ("3", "3", 3),
    "batch_size": ("5", "5", 5),
    "optimizer": ("adamw", '"adamw"', "adamw"),
    "learning_rate": ("0.25", "0.25", 0.25),
    "momentum": ("0.5", "0.5", 0.5),
    "weight_decay": ("1e-3", "1e-3", 0.001),
    "last_batch": ("drop", '"drop"', "drop"),
    "base_batch": ("64", "64", 64),
    "schedule": ("constant", '"constant"', "constant"),
    "warmup_epochs": ("1.5", "1.5", 1.5),
    "step_epochs": ("2.5", "2.5", 2.5),
    "step_factor": ("0.5", "0.5", 0.5),
    "clip_norm": ("1.5", "1.5", 1.5),
    "ema": ("0.99", "0.99", 0.99),
    "label_smoothing": ("0.1", "0.1", 0.1),
    "accumulation_steps": ("4", "4", 4),
    "precision": ("bf16", '"bf16"', "bf16"),
    "parallel": ("fsdp", '"fsdp"', "fsdp"),
    "compile": ("", "true", True),
    "channels_last": ("", "true", True),
    "activation_checkpointing": ("", "true", True),
    "wrap_parameters": ("1000", "1000", 1000),
    "shard_within": ("node", '"node"', "node"),
    "cpu_offload": ("", "true", True),
    "bucket_mb": ("2.5", "2.5", 2.5),
    "find_unused_parameters": ("", "true", True),
    "deterministic": ("", "true", True),
    "seed": ("12", "12", 12),
    "evaluate_every": ("2", "2", 2),
    "sync": ("ring:segments=2", '"ring:segments=2"', "ring:segments=2"),
    "transport": ("mpi", '"mpi"', "mpi"),
    "wire_dtype": ("bfloat16", '"bfloat16"', "bfloat16"),
    "overlap": ("off", '"off"', "off"),
    "servers": ("3", "3", 3),
    "server_placement": ("dedicated", '"dedicated"', "dedicated"),
    "staleness": ("unlimited", '"unlimited"', "unlimited"),
    "average_every": ("8", "8", 8),
    "straggler": ("random=4", '"random=4"', "random=4"),
    "on_save_error": ("stop", '"stop"', "stop"),
    "preempt_signal": ("USR1,TERM", '"USR1,TERM"', "USR1,TERM"),
    "on_nan": ("skip", '"skip"', "skip"),
    "on_bad_sample": ("skip", '"skip"', "skip"),
    "save_every": ("3epochs", '"3epochs"', "3epochs"),
    "checkpoint_dir": ("saved", '"saved"', Path("saved")),
    "keep": ("5", "5", 5),
    "resume": ("never", '"never"', "never"),
    "export": ("a.pt", '"a.pt"', Path("a.pt")),
    "evaluate_only": ("", "true", True),
    "predict": ("a.npy", '"a.npy"', "a.npy"),
    "weights": ("a.pt", '"a.pt"', Path("a.pt")),
    "weights_prefix": ("encoder", '"encoder"', "encoder"),
    "weights_except": ("fc.*", '"fc.*"', "fc.*"),
    "backend": ("gloo", '"gloo"', "gloo"),
    "devices": ("0, 2", '"0, 2"', "0, 2"),
    "interface": ("node1=ib0,node2=eth0", '"node1=ib0,node2=eth0"', "node1=ib0,node2=eth0"),
    "port_range": ("4000-4009", '"4000-4009"', "4000-4009"),
    "tuning": ("a.json", '"a.json"', "a.json"),
    "collectives": ("mpiddp", '"mpiddp"', "mpiddp"),
    "timeout": ("12.5", "12.5", 12.5),
    "allow_shared_gpu": ("", "true", True),
    "lifeline_timeout": ("7.5", "7.5", 7.5),
    "stall_timeout": ("0", "0", 0.0),
    "debug": ("", "true", True),
    "bind": ("numa", '"numa"', "numa"),
    "log_every": ("7", "7", 7),
    "track_network": ("", "true", True),
    "track": ("mlflow", '"mlflow"', "mlflow"),
    "profile": ("all", '"all"', "all"),
    "log_dir": ("logs", '"logs"', Path("logs")),
    "console": ("0,3-5", '"0,3-5"', "0,3-5"),
    "label": ("", "true", True),
    "quiet": ("", "true", True),
}
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
def test_every_option_is_read_from_the_command_line(field: str, defaults: Configuration) -> None:
    word, _, value = EXAMPLES[field]
    more = NEEDED.get(field, ())
    configuration = parse([flag(field), *([word] if word else []), *more])
    assert getattr(configuration, field) == value != getattr(defaults, field)


@pytest.mark.parametrize("field", TYPED)
def test_every_option_is_read_from_toml(field: str, write_toml: WriteToml) -> None:
    path = write_toml(f"{field} = {EXAMPLES[field][1]}")
    more = NEEDED.get(field, ())
    assert getattr(parse(["--config", str(path), *more]), field) == EXAMPLES[field][2]


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


def test_what_is_left_open_is_resolved() -> None:
    for name, source in DATASETS.items():
        assert parse(["--data", name]).model == source.model
    for optimizer, rate in LEARNING_RATES.items():
        assert parse(["--optimizer", optimizer]).learning_rate == rate
    assert parse(["--data", "digits", "--model", "mlp"]).model == "mlp"


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1)
names = texts.filter(lambda t: t not in (".", "..") and not set(t) & set("/\n") and len(t) < 200)
positive = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
seconds = st.floats(min_value=0, max_value=LONGEST_TIMEOUT, exclude_min=True)
configurations = st.builds(
    Configuration,
    name=st.none() | names,
    runs_dir=texts.map(Path),
    data=st.sampled_from(sorted(DATASETS)),
    samples=st.integers(min_value=2),
    model=st.sampled_from(["auto", *MODELS]),
    epochs=st.integers(min_value=1),
    batch_size=st.integers(min_value=1),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    learning_rate=st.none() | positive,
    momentum=st.floats(min_value=0, max_value=1, exclude_max=True),
    weight_decay=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    evaluate_every=st.integers(min_value=1),
    # With framework the next three have nothing to say.
    sync=st.sampled_from(["auto", "ring", "two-level:inner=direct,segments=3"]),
    transport=st.sampled_from(["auto", "shared-memory", "shared-memory+mpi", "mpi", "torch"]),
    wire_dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    overlap=st.sampled_from(["auto", "on", "off"]),
    backend=st.sampled_from(["auto", "nccl", "gloo", "mpi"]),
    devices=st.sampled_from(["auto", "cpu", "cuda", "3", "0,2"]),
    interface=texts,
    port_range=st.sampled_from(["auto", "1-65535"]),
    tuning=texts,
    collectives=st.sampled_from(["framework", "mpiddp"]),
    timeout=seconds,
    allow_shared_gpu=st.booleans(),
    stall_timeout=seconds,
    debug=st.booleans(),
    bind=st.sampled_from(["auto", "none", "cores", "numa"]),
    log_dir=st.none() | texts.map(Path),
    console=st.sampled_from(["all", "none", "0", "2-3,7"]),
    label=st.booleans(),
)


@given(configuration=configurations)
def test_toml_reads_back_as_the_same_configuration(configuration, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    path.write_text(to_toml(configuration), encoding="utf-8")
    assert Configuration(**read_toml(path)) == configuration


@settings(max_examples=10)
@given(configuration=configurations)
def test_a_saved_configuration_can_be_run_again(configuration, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "again.toml"
    path.write_text(to_toml(configuration.resolve()), encoding="utf-8")
    assert parse(["--config", str(path)]) == configuration.resolve()


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--epochz", "3"], ["unknown option --epochz", "did you mean --epochs?"]),
        (["--lr", "3"], ["--lr is an option of other trainers; for mpiddp, type --learning-rate"]),
        (["--cn", "3"], ["unknown option --cn", "did you mean --clip-norm?"]),
        (
            ["--amp"],
            ["--amp is an option of other trainers; for mpiddp, type --precision bf16, or"],
        ),
        (["--fp16"], ["of other trainers; for mpiddp, type --precision fp16 on GPUs"]),
        (["--wandb"], ["of other trainers; for mpiddp, type --track wandb, --track tensorboard"]),
        (["--output-dir", "a"], ["type --runs-dir DIR --name NAME; the run is DIR/NAME"]),
        (["--max-steps=3"], ["--max-steps is an option of other trainers; for mpiddp, type --epo"]),
        (["--ckpt", "a"], ["--ckpt is an option of other trainers; for mpiddp, type --resume PA"]),
        (
            ["--random_seed", "3"],
            ["--random_seed is an option of other trainers; for mpiddp, type"],
        ),
        (["--model_dir", "a"], ["type --export DIR/FILE.pt, for the trained weights"]),
        (["--model_filename", "a"], ["type --export DIR/FILE.pt, for the trained weights"]),
        (["--mixed_precision", "bf16"], ["other trainers; for mpiddp, type --precision bf16, or"]),
        (["--resume"], ["--resume expects a value, auto|never|PATH: Where to start: at the run's"]),
        (["--resume", "--name", "a"], ["--resume expects a value, auto|never|PATH: Where to"]),
        (["--learning_rat=3"], ["unknown option --learning_rat", "--learning-rate?"]),
        (["--no-epochs"], ["unknown option --no-epochs"]),
        (
            ["--nproc_per_node=2"],
            ["--nproc_per_node is an option of torchrun; for mpiddp, type -n"],
        ),
        (["--xyzzy"], ["unknown option --xyzzy", "--help"]),
        (["-x"], ["-x"]),
        (["digits"], ["digits"]),
        (["--epochs"], ["--epochs"]),
        (["--epochs", "many"], ["--epochs", "many"]),
        (["--epochs", "1.5"], ["--epochs", "1.5"]),
        (["--optimizer", "adam"], ["optimizer: ", "adam", "sgd", "adamw", REFERENCE]),
        (["--backend", "ucc"], ["--backend", "ucc", "nccl", "gloo"]),
        (["--devices", "gpu"], ["devices", "auto, cpu, cuda", "'0,2'", "'gpu'"]),
        (["--devices", "0,0"], ["devices", "each GPU once", "'0,0'"]),
        (["--data", "digit"], ["data", "'digit'", "did you mean digits?", *DATASETS]),
        (["--model", "resnet"], ["model", "'resnet'", *MODELS]),
        (["--epochs", "0"], ["epochs", "1 or more", "0"]),
        (["--batch-size", "-1"], ["--batch-size", "1 or more", "-1"]),
        (["--evaluate-every", "0"], ["evaluate_every", "1 or more"]),
        (["--samples", "1"], ["samples", "2 or more"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--learning-rate", "0"], ["learning_rate", "above 0"]),
        (["--learning-rate", "nan"], ["learning_rate", "above 0", "nan"]),
        (["--momentum", "1"], ["momentum", "below 1"]),
        (["--weight-decay", "-0.1"], ["weight_decay", "0 or more"]),
        (["--timeout", "inf"], ["timeout", "inf"]),
        (["--name", "a/b"], ["name", "'a/b'"]),
        (["--name", ""], ["name", "''"]),
        (["--name", "a\udcff"], ["name", "broken"]),
        (["--interface", ""], ["interface"]),
        (["--sync", "rong"], ["sync", "framework, auto", "'rong'", "ring"]),
        (["--sync", "ring:parts=3"], ["sync", "'parts=3'", "segments=…"]),
        (["--sync", "auto", "--transport", "pigeon"], ["pigeon", "shared-memory", "torch"]),
        (["--sync", "auto", "--wire-dtype", "int8"], ["int8", "bfloat16"]),
        (["--transport", "mpi"], ["transport = 'mpi'", "sync = 'framework'", "--sync ALGORITHM"]),
        (["--evaluate-only"], ["evaluate_only = true needs weights: give --weights FILE.pt"]),
        (["--weights-prefix", "a"], ["weights_prefix = 'a' needs weights", "--weights FILE.pt"]),
        (["--weights-except", "a.*"], ["weights_except = 'a.*' needs weights: give"]),
        (["--weights", "a", "--resume", "b"], ["weights = 'a'", "resume = 'b': both say where"]),
        (["--export", "w-{loss}.pt"], ["expected no braces but {epoch} and {step}, in the file's"]),
        (["--export", "w-{epoch:03d}.pt"], ["export: expected ", "found 'w-{epoch:03d}.pt'"]),
        (["--export", "{step}/w.pt"], ["export: expected ", "found '{step}/w.pt'"]),
        (
            ["--export", "b", "--evaluate-only", "--weights", "a"],
            ["export = 'b'", "evaluate_only = true"],
        ),
        (["--model", "mine:"], ["model", "'mine:'", REFERENCE]),
        (["--task", "mine"], ["task", "'mine'", REFERENCE]),
        (["--data", "mine:make"], ["model = 'auto'", "data = 'mine:make'", "--model"]),
        (["--help", "modle"], ["--help", "'modle'", "did you mean model?", *GROUPS]),
        (["--wire-dtype", "float16"], ["wire_dtype", "'float16'", "--sync auto"]),
        (["--overlap", "off"], ["overlap", "'off'", "--sync auto"]),
        (["--staleness", "3"], ["staleness", "'3'", "--sync parameter-server"]),
        (["--servers", "2", "--sync", "ring"], ["servers", "2", "--sync parameter-server"]),
        (["--sync", "parameter-server", "--servers", "0"], ["servers", "1 or more", "0"]),
        (["--sync", "parameter-server", "--staleness", "-1"], ["staleness", "-1"]),
        (["--track", "neptune"], ["tensorboard, mlflow, wandb", "'neptune'"]),
        (["--sync", "parameter-server", "--transport", "mpi"], ["transport", "--sync auto"]),
        (
            ["--sync", "parameter-server", "--ema", "0.9"],
            ["ema = 0.9", "sync = 'parameter-server'"],
        ),
        (["--sync", "parameter-server", "--clip-norm", "1"], ["clip_norm = 1.0", "give another"]),
        (["--sync", "parameter-server", "--precision", "fp16"], ["'fp16'", "--precision bf16"]),
        (["--parallel", "fsdp", "--sync", "ring"], ["sync = 'ring'", "parallel = 'fsdp'"]),
        (
            ["--parallel", "fsdp", "--sync", "parameter-server"],
            ["sync = 'parameter-server'", "parallel = 'fsdp'", "leave out --sync"],
        ),
        (["--average-every", "0"], ["average_every", "1 or more steps", "0"]),
        (
            ["--average-every", "2", "--parallel", "fsdp"],
            ["average_every = 2", "parallel = 'fsdp'", "--parallel ddp"],
        ),
        (
            ["--average-every", "2", "--sync", "parameter-server"],
            ["average_every = 2", "sync = 'parameter-server'", "give another --sync"],
        ),
        (
            ["--average-every", "2", "--sync", "ring", "--wire-dtype", "bfloat16"],
            ["wire_dtype = 'bfloat16'", "average_every = 2", "leave out one of them"],
        ),
        (
            ["--batch-size", "auto", "--parallel", "fsdp"],
            ["batch_size = 'auto'", "parallel = 'fsdp'", "give a number"],
        ),
        (["--batch-size", "all"], ["--batch-size: expected 1 or more samples, or auto", "'all'"]),
        (["--parallel", "none", "--bucket-mb", "5"], ["bucket_mb = 5.0", "parallel = 'none'"]),
        (["--sync", "parameter-server", "--bucket-mb", "5"], ["bucket_mb", "another --sync"]),
        (["--shard-within", "node"], ["shard_within = 'node'", "parallel = 'ddp'"]),
        (["--wrap-parameters", "5"], ["wrap_parameters = 5", "--activation-checkpointing"]),
        (
            ["--parallel", "fsdp", "--cpu-offload", "--clip-norm", "1"],
            ["cpu_offload = true", "clip_norm = 1.0"],
        ),
        (["--bucket-mb", "0"], ["--bucket-mb: expected a number of MB > 0", "'0'"]),
        (["--bucket-mb", "auto"], ["--bucket-mb: expected a number of MB > 0", "'auto'"]),
        (["--step-factor", "0.5"], ["step_factor = 0.5", "schedule = 'cosine'"]),
        (["--accumulation-steps", "3"], ["a divisor of batch_size = 16", "found 3"]),
        (["--warmup-epochs", "16"], ["warmup_epochs", "0 to epochs = 15", "16"]),
        (["--ema", "1"], ["ema", "0 to below 1", "1.0"]),
        (["--straggler", "first=4"], ["straggler", "RANK=FACTOR", "random=4", "'first=4'"]),
        (["--config", "absent.toml"], ["config", "absent.toml", "No such file"]),
        (["--config", "."], ["config", "directory"]),
    ],
    ids=" ".join,
)
def test_a_bad_command_line_is_refused(arguments: list[str], fragments: list[str]) -> None:
    message = refuse(arguments)
    assert [fragment for fragment in fragments if fragment not in message] == []


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("epoch = 3", ["unknown key 'epoch'", "did you mean epochs?"]),
        ("config = 'x'", ["unknown key 'config'"]),
        ("batch-size = 3", ["unknown key 'batch-size'", "did you mean batch_size?"]),
        ("max_steps = 3", ["unknown key 'max_steps': --max_steps is an option of other trainers"]),
        ("epochs = true", ["epochs", "an integer", "True (bool)"]),
        ("epochs = 3.0", ["epochs", "an integer", "3.0 (float)"]),
        ("epochs = '3'", ["epochs", "an integer", "'3' (str)"]),
        ("epochs = 0", ["epochs", "1 or more", "0"]),
        ("learning_rate = false", ["learning_rate", "a number", "False (bool)"]),
        (f"learning_rate = 1{'0' * 400}", ["learning_rate", "too large"]),
        ("timeout = nan", ["timeout", "nan"]),
        ("allow_shared_gpu = 1", ["allow_shared_gpu", "true or false", "1 (int)"]),
        ("name = 3", ["name", "a string", "3 (int)"]),
        ("runs_dir = ['a']", ["runs_dir", "a string", "['a'] (list)"]),
        ("data = 'digit'", ["data", "did you mean digits?"]),
        ("backend = 'ncll'", ["backend", "did you mean nccl?"]),
        ("backend = 1", ["backend", "nccl", "1 (int)"]),
        ("[epochs]\nmany = 3", ["epochs", "an integer", "(dict)"]),
        ("epochs = \nseed = 1", ["not valid TOML", "line 1"]),
        ("epochs = 3\nepochs = 4\n", ["not valid TOML", "line 2"]),
        ("a = " + "[" * 100_000, ["not valid TOML"]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_bad_toml_file_is_refused(text: str, fragments: list[str], write_toml: WriteToml) -> None:
    path = write_toml(text)
    message = refuse(["--config", str(path)])
    assert [fragment for fragment in [str(path), *fragments] if fragment not in message] == []


def test_an_integer_is_fine_for_a_float(write_toml: WriteToml) -> None:
    rate = read_toml(write_toml("learning_rate = 1"))["learning_rate"]
    assert (rate, type(rate)) == (1.0, float)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_bytes(b"name = '\xff'")
    assert "utf-8" in refuse(["--config", str(path)])


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_complaint_is_one_line_in_any_encoding(encoding: str) -> None:
    program = (
        "from mpiddp.training.options.config import parse\n"
        "try: parse(['--epochs', 'many'])\n"
        "except Exception as error: print(error)"
    )
    answer = run_python("-c", program, env={"PYTHONIOENCODING": encoding}).expect(0)
    assert answer.stdout == "--epochs: expected an integer, found 'many'\n"
    assert answer.stderr == ""


def test_help_names_every_option_with_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert not caught.value.code
    shown = capsys.readouterr().out
    for field in [*FIELDS, "config"]:
        assert flag(field) in shown
    # Long lists are wrapped.
    shown = re.sub(r"[\s│]+", "", shown)
    assert "{" + ",".join([*DATASETS, REFERENCE]) + "}" in shown
    assert "{auto," + ",".join([*MODELS, REFERENCE]) + "}" in shown


def test_help_shows_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help", "model"])
    assert not caught.value.code
    shown = capsys.readouterr().out
    names = {flag(field.name) for field in dataclasses.fields(GROUPS["model"])}
    found = set(re.findall(r"--[a-z][a-z-]+", shown))
    assert names < found and not found & (set(map(flag, FIELDS)) - names)


def test_every_option_is_in_one_group_and_has_a_description() -> None:
    names = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    assert sorted(names) == sorted(FIELDS)
    for group in GROUPS.values():
        texts = read_docstrings(group)
        for field in dataclasses.fields(group):
            assert texts[field.name], field.name


def test_help_is_silent_where_another_rank_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], show_help=False)
    assert not caught.value.code
    assert capsys.readouterr() == ("", "")


def test_help_imports_nothing_but_the_parser() -> None:
    # Whatever else it imported, it would wait for; how long it takes, the benchmark of start-up
    # tells (`--help` is one of its contenders).
    program = (
        "import sys, json, runpy\n"
        "before = set(sys.modules)\n"
        "sys.argv = ['train', '--help']\n"
        "try: runpy.run_module('mpiddp.train', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(json.dumps(sorted(set(sys.modules) - before)))"
    )
    answer = run_python("-c", program).expect(0)
    packages = {name.partition(".")[0] for name in json.loads(answer.stderr)}
    imported = packages - sys.stdlib_module_names
    assert imported == {"mpiddp"}
