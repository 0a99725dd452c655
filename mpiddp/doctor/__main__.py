"""``python -m mpiddp.doctor``: examine the launch, and say what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpiddp.doctor.examiner.doctor_options import parse
from mpiddp.launch.failure.failure import FailureHandler
from mpiddp.launch.launcher.launcher import is_first
from mpiddp.options.outputs import check_outputs


def check(words: Sequence[str]) -> None:
    """Raise ConfigurationError for what can be refused before any rank is started."""
    check_outputs(parse(words).output)


def main() -> None:
    """Examine all ranks that the launcher started, and leave with the findings' exit code."""
    with FailureHandler() as failure_handler:
        settings = parse(sys.argv[1:], show_help=is_first())
        if is_first():
            check_outputs(settings.output)
        # Here, so that --help reads nothing but the command line.
        from mpiddp.doctor.examination import examine

        failure_handler.leave(examine(settings, failure_handler))


if __name__ == "__main__":
    main()
