"""``python -m mpiddp export RUN``: the plain weights of a checkpoint, without any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mpiddp.checkpoints.storage.manifest import MANIFEST
from mpiddp.errors import ConfigurationError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.options.fields import Argument
from mpiddp.options.outputs import FOLDER, Kind, Outputs, check_outputs, writes
from mpiddp.options.reader import read
from mpiddp.wording import count_noun, describe_size, print_message, print_text

DESCRIPTION = """\
Write the weights of a checkpoint as a plain state_dict, which torch.load(FILE, weights_only=True)
reads, or in the format of safetensors. RUN is a run's directory or one of checkpoints,
whose newest valid one is taken, or one checkpoint; also one of mpiddp.Checkpointer.

All files of the checkpoint are verified first. FILE is replaced if it is there."""

WEIGHTS = Kind("as by torch.save", (".pt", ".pth", ".bin"))
SAFETENSORS = Kind("as by safetensors", (".safetensors",))
USUAL_NAME = "weights-<step>.pt"
DIRECTORY = Kind(f"directory for {USUAL_NAME}", (FOLDER,))


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is written."""

    run: Annotated[Path, Argument("RUN", is_positional=True)]

    output: Annotated[Outputs, writes(WEIGHTS, SAFETENSORS, DIRECTORY)] = ()
    """Where they are written (default: weights-<step>.pt in the working directory)"""

    raw: bool = False
    """The weights themselves, also if the checkpoint has a moving average of them (--ema)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the weights that the command line names."""
    with FailureHandler():
        options = read(ExportOptions, arguments, "python -m mpiddp export", DESCRIPTION)
        check_outputs(options.output)
        files = [
            each.path / USUAL_NAME if each.kind is DIRECTORY else each.path
            for each in options.output
        ]
        print_text(export(options.run, *files or [Path(USUAL_NAME)], is_raw=options.raw))


def export(run: Path, *files: Path, is_raw: bool) -> str:
    """Write the weights into each file, and return a line for each that says what was written.

    A file called USUAL_NAME gets the step into its name, and its directory is made. The checkpoint
    is read once, and nothing is written if one file is refused. Raises ConfigurationError, or
    CheckpointError if no checkpoint can be used.
    """
    # Here, because they import torch: --help does without.
    import torch

    from mpiddp.checkpoints.plain_weights import check_format, read_weights, write_weights
    from mpiddp.checkpoints.storage.finding import find_valid, read_together
    from mpiddp.checkpoints.storage.rank_group import RankGroup

    ranks = RankGroup()
    found, damaged = find_valid(run, ranks)
    for path, problems in damaged.items():
        print_message(f"{path} is damaged ({problems[0]}): {found.path.name} is taken instead")
    step = found.manifest.step
    usual = f"weights-{step}.pt"
    targets = [each.with_name(usual) if each.name == USUAL_NAME else each for each in files]
    for target in targets:
        check_format(target, "export")
        if (target.parent / MANIFEST).exists():
            raise ConfigurationError(
                f"export: {target} would be in a checkpoint, which another file damages: choose "
                "another directory"
            )
    weights = read_together(found, ranks, lambda: read_weights(found, is_raw=is_raw))
    tensors = [each for each in weights.values() if isinstance(each, torch.Tensor)]
    size = describe_size(sum(each.nbytes for each in tensors))
    counted = count_noun(len(tensors), "tensor")
    lines = []
    for target in targets:
        try:
            if target.name == usual:
                target.parent.mkdir(parents=True, exist_ok=True)
            write_weights(target, weights)
        except OSError as error:
            raise ConfigurationError(f"export: cannot write {target}: {error.strerror}") from None
        lines.append(f"Weights written: {target} (step {step} of {found.path}: {counted}, {size})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
