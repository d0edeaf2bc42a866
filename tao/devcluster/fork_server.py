"""Starts Python programs by forking a process that has imported their modules already.

To import the modules of a server takes more than a second of a core, and a cluster has a dozen servers. The *fork
server* imports them once; a fork of it takes milliseconds, and shares its pages of memory. The forked process leads a
session of its own and has the environment, the working folder, the output and the command line (in `ps`) that it would
have had if it had been executed. It is a child of the process that asked for it: the fork server forks twice and the
process in between ends, while the asking process adopts orphans.

A program that starts servers itself may be forked together with a fork server of its own, which then has imported what
the first one has.

Variables that are read before a program runs (``PYTHON…``, ``MALLOC_…``) count as they were when the fork server
started. The seed of hashes is the same in all forks. This works on Linux only (``prctl``, ``/proc``).
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, NoReturn, Protocol

from tao.model.errors import OperatorError

_PYTHON: Final = (sys.executable, "-P", "-m")
"""How a program is executed. -P: modules in the folder where it starts must not replace installed ones."""
_COMMAND_BYTES: Final = 1024
"""The room for the command line of a forked process; a longer one is cut off."""
_ANSWER_SECONDS: Final = 30.0
"""How long a fork may take: normally milliseconds, but the machine may be busy."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


_SHARED: Final[dict[int, ForkServer]] = {}
"""The one of this process by its pid: a fork of this process, which is not the parent, starts its own."""


class _Process(Protocol):
    """The process of a fork server, as `subprocess.Popen` gives one."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class _Forked:
    """A child of this process that was forked, not executed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        status = self._reap(0)
        assert status is not None
        return status

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self._pid, options)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class ForkServer:
    """A process that waits to be forked. It ends with the process that made it, or at `close`."""

    def __init__(self, process: _Process, control: socket.socket, errors: IO[bytes] | None = None) -> None:
        """``control``: takes the orders of this process. ``errors``: what the process prints before it is ready; None
        when it is ready already."""
        self._lock = threading.Lock()
        self._is_ready = errors is None
        self._process, self._control, self._errors = process, control, errors
        atexit.register(self.close)

    @classmethod
    def start(cls, *preload: str) -> ForkServer:
        """Start one. ``preload`` names functions, as ``module:function``, that import the modules of the programs; they
        must not start a thread."""
        control, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*_PYTHON, __name__, str(theirs.fileno()), *preload, " " * _COMMAND_BYTES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return cls(process, control, process.stderr)

    @property
    def is_running(self) -> bool:
        """True until it has ended."""
        return self._process.poll() is None

    async def ready(self) -> ForkServer:
        """Wait until it has imported the modules, and return it. Raises `OperatorError` when it ends instead."""
        if not self._is_ready:
            await asyncio.to_thread(self._wait)
        return self

    def _wait(self) -> None:
        with self._lock:
            self._is_ready = self._is_ready or bool(self._control.recv(1))
        if not self._is_ready:
            assert self._errors is not None
            reason = self._errors.read().decode(errors="replace").strip()
            raise OperatorError(f"the process that servers are forked from has ended: {reason}")

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        log: int,
        *,
        detached: bool,
        starts_servers: bool = False,
    ) -> int:
        """Run ``argv``, a Python interpreter's ``-P -m MODULE …``, in a fork; call it once this is `ready`.

        ``log`` is the descriptor of its standard output and error. Unless it is detached, it is killed when this
        process ends. If it starts servers, its `tao_fork_server` is a further fork, of which it is the parent; the
        modules of this fork server have to include those of the servers. Returns its process id; it is a child of this
        process. Raises `OSError`."""
        if tuple(argv[: len(_PYTHON)]) != _PYTHON:
            raise ValueError(f"{argv} cannot be forked: it is no {' '.join(_PYTHON)}")
        order = {
            "argv": list(argv),
            "env": dict(env),
            "folder": str(folder.absolute()),
            "parent": os.getpid(),
            "detached": detached,
            "starts_servers": starts_servers,
        }
        ours, theirs = socket.socketpair()
        with ours, theirs, self._lock, _adoption():
            ours.settimeout(_ANSWER_SECONDS)
            socket.send_fds(self._control, [b"f"], [theirs.fileno(), log])
            theirs.close()
            ours.sendall(json.dumps(order).encode())
            ours.shutdown(socket.SHUT_WR)
            answer = ours.recv(64)
        if not answer:
            raise ChildProcessError("the process that servers are forked from did not fork")
        return int(answer)

    def close(self) -> None:
        """End it; the forked processes go on. Idempotent."""
        self._control.close()
        self._process.wait()
        if self._errors is not None:
            self._errors.close()
        atexit.unregister(self.close)


def tao_fork_server() -> ForkServer:
    """Return the fork server of this process for the servers of tao; start it when there is none yet.

    It is shared by all clusters of the process, because its start takes as long as that of a server."""
    server = _SHARED.get(os.getpid())
    if server is None or not server.is_running:
        server = _SHARED[os.getpid()] = ForkServer.start("tao.cli:import_servers")
    return server


@contextmanager
def _adoption() -> Iterator[None]:
    """Have the orphans of this process's descendants become its children meanwhile."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _serve(control: socket.socket) -> tuple[int, int]:
    """Fork a process for each order. Returns in the forked ones alone, with the descriptors of the order and the log;
    ends this process when the one that started it has ended."""
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 2)
        if not descriptors:
            sys.exit()
        if len(list(Path("/proc/self/task").iterdir())) != 1:
            raise RuntimeError("a process with several threads cannot be forked: find the import that starts one")
        in_between, adopted = os.pipe()
        child = os.fork()
        if child == 0:
            if os.fork() != 0:
                os._exit(0)
            os.close(adopted)
            # The end of the pipe says that the process in between has been reaped: the parent is the asking process.
            os.read(in_between, 1)
            os.close(in_between)
            return descriptors[0], descriptors[1]
        for descriptor in (*descriptors, in_between):
            os.close(descriptor)
        os.waitpid(child, 0)
        os.close(adopted)


def _run(order_from: int, log: int) -> NoReturn:
    """Run the ordered program in this process, as if it had been executed."""
    os.setsid()
    for output in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(log, output)
    os.close(log)
    with socket.socket(fileno=order_from) as channel:
        with channel.makefile("rb") as file:
            order = json.load(file)
        if not order["detached"]:
            # SIGKILL, not SIGTERM: a server that hangs in its shutdown would remain as an orphan.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != order["parent"]:
            sys.exit("the process that asked for this one has ended")
        channel.sendall(str(os.getpid()).encode())
    if order["starts_servers"]:
        _fork_server()
    _show(order["argv"])
    os.environ.clear()
    os.environ.update(order["env"])
    # The interpreter that runs already has read the variable of its own environment.
    added = order["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in added if each and each not in sys.path]
    os.chdir(order["folder"])
    _, _, _, module, *sys.argv[1:] = order["argv"]
    gc.enable()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def _fork_server() -> None:
    """Fork this process, before it runs its program, into the fork server of that program."""
    control, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        control.close()
        os.setsid()
        with theirs:
            order_from, log = _serve(theirs)
        _run(order_from, log)
    theirs.close()
    # In the module that the program imports: this one is `__main__`.
    imported = importlib.import_module("tao.devcluster.fork_server")
    imported._SHARED[os.getpid()] = imported.ForkServer(imported._Forked(pid), control)


def _show(argv: Sequence[str]) -> None:
    """Make ``argv`` the command line of this process in ``/proc``."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _main() -> NoReturn:
    _, descriptor, *preload, _ = sys.argv
    with socket.socket(fileno=int(descriptor)) as control:
        gc.disable()
        for name in preload:
            pkgutil.resolve_name(name)()
        # What was imported is neither looked at nor copied by a fork's collections of garbage.
        gc.freeze()
        control.sendall(b"r")
        order_from, log = _serve(control)
    _run(order_from, log)


if __name__ == "__main__":
    _main()
