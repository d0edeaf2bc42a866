"""A data directory made once per server version, and copied for every private instance.

Initialising takes a second or two and 114 MB; a copy of a directory that was initialised, started once with a small
redo log, and stopped, takes a tenth of a second and 33 MB. The template has no accounts but root's, no binlog and no
server identity (``auto.cnf``), so that copies may replicate from each other.

Two processes may want it at the same moment: a file lock lets one build, in a folder of its own name, and a rename
makes the result appear whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pymysql.err

from tao.devcluster.database_server import DatabaseServer
from tao.devcluster.ports import reserve_port
from tao.devcluster.processes import Lifetime
from tao.devcluster.server_binary import ServerBinary
from tao.devcluster.server_options import Durability, ServerFolder, ServerOptions, initialize_argv
from tao.model.errors import OperatorError
from tao.storage.accounts import confine_root

_BUILD_SECONDS = 120.0
_LOCK_PAUSE_SECONDS = 0.05
_TEMPLATE_MB = 300
_FORMAT = "3"  # to be raised when what is built here changes: old templates then count for nothing
_NOT_COPIED = ("binlog.*", "auto.cnf", "*.pid", "*.err", "ib_buffer_pool", "gtid_executed*", "*.sock*")


def default_cache_folder(env: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/tao``, else ``~/.cache/tao``."""
    configured = env.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(configured) if configured.startswith("/") else Path(env.get("HOME") or Path.home()) / ".cache"
    return root / "tao"


def template_name(binary: ServerBinary, redo_log_mb: int) -> str:
    """What distinguishes templates: flavour, version, program (two builds of one version differ), redo log size."""
    key = f"{_FORMAT}\n{binary.path}\n{redo_log_mb}"
    return f"{binary.flavour}-{binary.version_text}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def require_free_disk(folder: Path, min_free_mb: int) -> None:
    """Raise `OperatorError` when the file system of ``folder`` (which may not exist yet) has less free."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free_mb = shutil.disk_usage(existing).free // 2**20
    if free_mb < min_free_mb:
        raise OperatorError(
            f"{folder} has {free_mb} MB of free disk, {min_free_mb} MB are needed: make room or choose another folder"
        )


async def prepare_template(binary: ServerBinary, cache_folder: Path, redo_log_mb: int) -> Path:
    """The template's data directory, made now if need be. Safe against others doing the same, and against crashes.

    Raises `OperatorError` with the initialiser's or the server's last words when it cannot be made.
    """
    templates = cache_folder / "databases"
    template = templates / template_name(binary, redo_log_mb)
    if template.is_dir():
        return template
    require_free_disk(templates, _TEMPLATE_MB)
    try:
        templates.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OperatorError(f"cannot make the cache folder {templates}: {error.strerror}") from error
    async with _file_lock(templates / f"{template.name}.lock"):
        if not template.is_dir():
            await _build(binary, template, redo_log_mb)
    return template


async def copy_template(template: Path, data: Path) -> None:
    """Make ``data`` a copy of the template, whole or not at all; shares blocks where the file system can.

    Raises `OperatorError` when it cannot be copied.
    """
    draft = data.with_name(f"{data.name}.copying")
    await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    await _run(["cp", "--archive", "--reflink=auto", str(template), str(draft)], "copying the database template")
    draft.rename(data)


async def _build(binary: ServerBinary, template: Path, redo_log_mb: int) -> None:
    # The caller holds the template's lock, so whatever lies here belongs to a builder that died. The name is short
    # because a socket's path must be.
    draft = ServerFolder(template.parent / f"build-{template.name.rpartition('-')[2]}")
    await asyncio.to_thread(shutil.rmtree, draft.path, ignore_errors=True)
    draft.path.mkdir(mode=0o700)
    as_root = os.geteuid() == 0
    await _run(initialize_argv(binary, draft.data, redo_log_mb, as_root=as_root), f"initialising {binary.flavour} data")
    # Started once, so that it has its small redo log and no copy has to make one.
    options = ServerOptions(redo_log_mb=redo_log_mb, durability=Durability.RELAXED)
    server = DatabaseServer(binary, draft, options, Lifetime.WITH_PARENT)
    await server.start(reserve_port(), _BUILD_SECONDS)
    try:
        async with server.connect_as_root() as connection:
            await confine_root(connection)
    except pymysql.err.MySQLError as error:
        raise OperatorError(f"cannot confine root in the database template: {error}") from error
    finally:
        stopped = await server.stop()
    if not stopped:
        raise OperatorError(f"the template's server did not shut down by itself: see {draft.log}")
    for pattern in _NOT_COPIED:
        for path in draft.data.glob(pattern):
            path.unlink()
    draft.data.rename(template)
    await asyncio.to_thread(shutil.rmtree, draft.path)


@contextlib.asynccontextmanager
async def _file_lock(path: Path) -> AsyncIterator[None]:
    """Hold the lock at ``path``; it ends with the process, however that ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _BUILD_SECONDS
    try:
        # Polled: a thread that waits in flock() could not be cancelled.
        while not _try_lock(descriptor):
            if loop.time() > deadline:
                raise OperatorError(f"another process has held {path} for {_BUILD_SECONDS:g} s: end it and try again")
            await asyncio.sleep(_LOCK_PAUSE_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _run(argv: Sequence[str], what: str) -> None:
    try:
        done = await asyncio.to_thread(
            subprocess.run, argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BUILD_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"{what} failed: {error}") from error
    if done.returncode != 0:
        output = (done.stdout + done.stderr).decode(errors="replace").splitlines()[-12:]
        raise OperatorError(f"{what} failed with status {done.returncode}:\n" + "\n".join(output))
