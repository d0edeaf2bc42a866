"""Which database server this machine has: MariaDB or MySQL, its version, and the tool that initialises its data.

Both call their server ``mysqld`` (Debian's MariaDB keeps that name as a link), so the flavour is what ``--version``
says and never what the file is called.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tao.model.errors import OperatorError

ENVIRONMENT_VARIABLE = "TAO_MYSQLD"
_NAMES = ("mariadbd", "mysqld")
_SYSTEM_FOLDERS = (Path("/usr/sbin"), Path("/usr/local/sbin"), Path("/usr/local/bin"), Path("/usr/libexec"))
_VERSION_SECONDS = 30.0
_OLDEST = {"mariadb": (10, 11, 0), "mysql": (8, 0, 0)}
_VERSION_PATTERN = re.compile(r"\bVer (\d+)\.(\d+)\.(\d+)")


class Flavour(StrEnum):
    """The two families of servers (DESIGN.md §3)."""

    MARIADB = "mariadb"
    MYSQL = "mysql"


class ServerBinaryMissing(OperatorError):
    """No usable database server on this machine; the message has the one line that installs one."""

    reason = "SERVER_BINARY_MISSING"


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server program that can be started."""

    path: Path
    flavour: Flavour
    version: tuple[int, int, int]
    initializer: Path
    """``mariadb-install-db`` for MariaDB; MySQL's server initialises its data itself."""

    @property
    def version_text(self) -> str:
        """The version as ``10.11.19``."""
        return ".".join(map(str, self.version))


def find_server_binary(env: Mapping[str, str]) -> ServerBinary:
    """The server that ``TAO_MYSQLD`` names, else the first ``mariadbd`` or ``mysqld`` on ``PATH`` or in /usr/sbin.

    Runs it once with ``--version`` (a few milliseconds). Raises `ServerBinaryMissing` when there is none, and
    `OperatorError` when the one found cannot be used.
    """
    path = _locate(env)
    flavour, version = parse_version(_ask_version(path), path)
    return ServerBinary(path, flavour, version, _initializer(path, env) if flavour is Flavour.MARIADB else path)


def parse_version(text: str, path: Path) -> tuple[Flavour, tuple[int, int, int]]:
    """Flavour and version from what ``--version`` printed. Raises `OperatorError` for anything else or too old."""
    match = _VERSION_PATTERN.search(text)
    if match is None:
        raise OperatorError(f"{path} --version says nothing about a version: is it a MariaDB or MySQL server?")
    flavour = Flavour.MARIADB if "mariadb" in text.lower() else Flavour.MYSQL
    version = (int(match[1]), int(match[2]), int(match[3]))
    if version < _OLDEST[flavour]:
        oldest = ".".join(map(str, _OLDEST[flavour][:2]))
        raise OperatorError(f"{path} is {flavour} {'.'.join(map(str, version))}: {oldest} or later is needed")
    return flavour, version


def _locate(env: Mapping[str, str]) -> Path:
    named = env.get(ENVIRONMENT_VARIABLE)
    if named:
        found = shutil.which(named, path=env.get("PATH", ""))
        if found is None:
            raise ServerBinaryMissing(f"{ENVIRONMENT_VARIABLE}={named} is not a program: name a mariadbd or mysqld")
        return Path(found).absolute()
    for name in _NAMES:
        on_path = shutil.which(name, path=env.get("PATH", ""))
        candidates = [Path(on_path)] if on_path else []
        candidates += [folder / name for folder in _SYSTEM_FOLDERS if (folder / name).is_file()]
        if candidates:
            return candidates[0].absolute()
    install = "apt-get install mariadb-server-core mariadb-client-core"
    raise ServerBinaryMissing(
        f"no mariadbd or mysqld found: `{install}` installs one that starts no daemon, "
        f"or set {ENVIRONMENT_VARIABLE} to the program"
    )


def _ask_version(path: Path) -> str:
    try:
        answer = subprocess.run(
            [path, "--no-defaults", "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperatorError(f"{path} cannot be run: {error}") from error
    if answer.returncode != 0:
        raise OperatorError(f"{path} --version failed: {answer.stderr.strip() or answer.returncode}")
    return answer.stdout


def _initializer(server: Path, env: Mapping[str, str]) -> Path:
    """The script that belongs to this server: beside it first, so that two installations do not mix."""
    install_folder = server.resolve().parent.parent
    for folder in (install_folder / "bin", install_folder / "scripts"):
        for name in ("mariadb-install-db", "mysql_install_db"):
            if (folder / name).is_file():
                return folder / name
    for name in ("mariadb-install-db", "mysql_install_db"):
        found = shutil.which(name, path=env.get("PATH", ""))
        if found:
            return Path(found)
    raise ServerBinaryMissing(f"{server} has no mariadb-install-db: `apt-get install mariadb-server-core` brings it")
