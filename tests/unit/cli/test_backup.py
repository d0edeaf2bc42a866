"""`tao backup` without databases: what it prints, and which words it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tao.admin.backup_files import MANIFEST, DatabaseDump, Manifest, write_document, write_file
from tao.cli.backup import Moment
from tao.cli.commands import tao


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(tao, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """A backup of one database, as far as it is read here."""
    dump = DatabaseDump(
        name="db-1",
        server="east-db-1",
        region="east",
        dialect="mariadb",
        position="1-1-7",
        version_epoch=1,
        shards=((0, 63),),
        snapshot_unix_ms=1_795_614_686_000,
        statement_bytes=4,
        file=write_file(tmp_path / "db-1.sql.gz", b"dump"),
    )
    manifest = Manifest(tao_version="0", begun_unix_ms=0, ended_unix_ms=0, shards=64, documents=(), databases=(dump,))
    write_document(tmp_path / MANIFEST, manifest)
    return tmp_path


def test_a_whole_backup_says_how_far_it_reaches(backup: Path) -> None:
    result = call("backup", "verify", backup)
    assert result.exit_code == 0
    assert "1 file as they were written" in result.stdout
    assert "from 2026-11-25T13:51:26Z to 2026-11-25T13:51:26Z" in result.stdout


def test_a_damaged_backup_names_the_file_and_the_fault(backup: Path) -> None:
    (backup / "db-1.sql.gz").write_bytes(b"dumb")
    result = call("backup", "verify", backup, "--json")
    assert result.exit_code == 1
    (fault,) = json.loads(result.stdout)["faults"]
    assert fault["file"] == "db-1.sql.gz"
    assert "SHA-256" in fault["fault"]
    assert "1 of 1 file damaged" in call("backup", "verify", backup).stdout


def test_a_folder_without_a_manifest_is_reported_in_one_line(tmp_path: Path) -> None:
    result = call("backup", "verify", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no manifest.json: it holds no backup, or one that was interrupted" in result.stderr


@pytest.mark.parametrize(
    "text", ["2026-11-25T13:51:26Z", "2026-11-25 13:51:26", "2026-11-25T14:51:26+01:00", "2026-11-25T13:51:26+00:00"]
)
def test_a_moment_without_an_offset_is_utc(text: str) -> None:
    assert Moment().convert(text, None, None) == 1_795_614_686


@pytest.mark.parametrize("text", ["yesterday", "2026-11-25T13:51:26.5Z"])
def test_a_moment_is_a_whole_second(text: str, backup: Path) -> None:
    result = call("backup", "restore", backup, "--until", text)
    assert result.exit_code == 2
    assert "--until" in result.stderr
