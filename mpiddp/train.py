"""``python -m mpiddp.train``: the trainer's command line; ``--help`` lists its options."""

from __future__ import annotations

import sys

from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.signals import heed_signals
from mpiddp.launch.launcher.launcher import find_rank, is_first
from mpiddp.launch.output import Output, redirect
from mpiddp.launch.session import Options
from mpiddp.launch.startup import start
from mpiddp.training.config import parse
from mpiddp.training.run_directory import forget_outcome


def main() -> None:
    """Train on all ranks that the launcher started, and leave with a documented exit code."""
    with FailureHandler() as failure_handler:
        heed_signals(failure_handler.fail)
        configuration = parse(sys.argv[1:], show_help=is_first())
        output = Output(configuration.log_dir, configuration.console, configuration.label)
        failure_handler.output = redirect(output, find_rank())
        if is_first():
            failure_handler.run_directory = forget_outcome(configuration)
        options = Options(
            backend=configuration.backend,
            timeout=configuration.timeout,
            interface=configuration.interface,
            allow_shared_gpu=configuration.allow_shared_gpu,
            lifeline_timeout=configuration.lifeline_timeout,
            bind=configuration.bind,
            stall_timeout=configuration.stall_timeout,
            output=output,
        )
        with start(options, failure_handler) as session:
            # Here, because it imports torch: --help does without, and start imports it while
            # MPI starts.
            from mpiddp.training.trainer import train

            train(configuration, session, failure_handler)


if __name__ == "__main__":
    main()
