"""The program that runs first in a new process, and then becomes the server.

It is run as a file (``python -I -S launch.py LIFETIME PARENT_PID FOLDER PROGRAM ARGUMENT…``), changes the folder, asks
the kernel to kill the process with its parent if ``LIFETIME`` says so, and executes the program. The usual place for
this, a function between fork and exec, may deadlock in a parent that has threads, and gRPC has. It imports nothing of
``tao``, so that it takes only some fifteen milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

WITH_PARENT = "with-parent"
DETACHED = "detached"
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Execute the program; never returns. A failure is one line on standard error and exit status 127."""
    lifetime, parent_pid, folder, *program = arguments
    try:
        if lifetime == WITH_PARENT:
            # SIGKILL, not SIGTERM: a server that hangs in its shutdown would remain as an orphan. Every server here
            # survives a kill by design.
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            if os.getppid() != int(parent_pid):  # it ended before the call of prctl
                os._exit(0)
        os.chdir(folder)
        # The interpreter ignores SIGPIPE, and an ignored signal is inherited through exec.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(program[0], program)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.stderr.write(f"cannot start {program[0]}: {error}\n")
        sys.exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
