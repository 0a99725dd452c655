"""``python -m mpiddp.train``: the trainer's command line; ``--help`` lists its options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpiddp.errors import ConfigurationError, PreemptedError, StoppedError
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.failure.signals import heed_signals
from mpiddp.launch.launcher.launcher import find_rank, is_first
from mpiddp.launch.packages import NEEDED_TO_TRAIN, check_packages
from mpiddp.launch.startup import start
from mpiddp.options.reader import name_as_typed
from mpiddp.process.preemption_signals import PreemptionSignals, parse_signals
from mpiddp.process.streams.output import redirect
from mpiddp.training.options.config import parse
from mpiddp.training.options.groups.checkpoints import AUTO, NEVER
from mpiddp.training.records.run_directory import find_path, forget_outcome, refuse_finished


def check(words: Sequence[str]) -> None:
    """Raise ConfigurationError for what can be refused before any rank is started."""
    with name_as_typed(words):
        configuration = parse(words)
        run = find_path(configuration)
        if run is not None:
            refuse_finished(run)
        # A run that resumes does not read its first weights again.
        is_new = configuration.resume in (AUTO, NEVER) and not (run is not None and run.exists())
        if configuration.weights is not None and is_new and not configuration.weights.exists():
            raise ConfigurationError(f"weights: there is no {configuration.weights}")


def main() -> None:
    """Train on all ranks that the launcher started, and leave with a documented exit code."""
    with FailureHandler(ends_with_run=True) as failure_handler:
        signals = PreemptionSignals()

        def stop(error: StoppedError) -> None:
            if not signals.take(error.number):
                failure_handler.fail(error)

        heed_signals(stop)
        configuration = parse(sys.argv[1:], show_help=is_first())
        signals.listen(parse_signals(configuration.preempt_signal))
        failure_handler.redirect(redirect(configuration, find_rank()))
        check_packages(NEEDED_TO_TRAIN)
        if is_first():
            failure_handler.foresee_run(forget_outcome(configuration))
        is_preempted = False
        with start(configuration, failure_handler) as session, name_as_typed(sys.argv[1:]):
            # Here, because it imports torch: --help does without, and start imports it while
            # MPI starts.
            from mpiddp.training.evaluation import evaluate_only
            from mpiddp.training.prediction import predict_only
            from mpiddp.training.trainer import train

            try:
                if configuration.predict is not None:
                    predict_only(configuration, session, failure_handler)
                elif configuration.evaluate_only:
                    evaluate_only(configuration, session, failure_handler)
                else:
                    train(configuration, session, failure_handler, signals)
            except PreemptedError:
                is_preempted = True
                signals.ignore()
        # All ranks have closed the session.
        if is_preempted:
            failure_handler.leave(PreemptedError.exit_code)


if __name__ == "__main__":
    main()
