"""Import torch in a thread, while MPI starts."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

from mpiddp import environment

PATIENCE_SECONDS = 20.0
"""An import that takes longer than this is slow."""


class TorchImport:
    """Imports torch.distributed and psutil in a thread, from the moment it is made.

    The garbage collector rests meanwhile, and what was imported is frozen out of it: scanning
    half a million new objects again and again finds nothing and costs 8 % of the import, and a
    third of the time that the interpreter takes to exit.

    The thread changes no environment variable. ``MPI_Init`` reads them meanwhile, and glibc's
    getenv crashes now and then beside a setenv. numpy would set one, and remove it again, but
    leaves it alone if it is set.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long the import took; valid after ``join``."""
        self._error: BaseException | None = None
        self._rests = gc.isenabled() and "torch" not in sys.modules
        self._sets = environment.OPENBLAS_MAIN_FREE not in os.environ
        if self._sets:
            os.environ[environment.OPENBLAS_MAIN_FREE] = "1"
        if self._rests:
            gc.disable()
        self._thread = threading.Thread(target=self._run, name="mpiddp-import", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the import. Raises what the import raised."""
        self._thread.join()
        if self._rests:
            gc.freeze()
        self.restore()
        if self._error is not None:
            raise self._error

    def restore(self) -> None:
        """Undo what was changed for the import; also for a start-up that does not get to join."""
        if self._rests:
            gc.enable()
        if self._sets:
            os.environ.pop(environment.OPENBLAS_MAIN_FREE, None)
        self._rests = self._sets = False

    def _run(self) -> None:
        begin = time.monotonic()
        try:
            # Both for the modules that they leave behind. psutil lists the interfaces: while
            # one rank seeks addresses, the others would wait for the import.
            import psutil  # noqa: F401 - see above
            import torch.distributed  # noqa: F401 - see above
        except BaseException as error:  # Raised again in join, on the thread that asked.
            self._error = error
        self.seconds = time.monotonic() - begin
