"""`tao doctor`: the usual mistakes of an installation, and what to do about each."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tao.admin.connection import current_topology
from tao.admin.diagnosis import Finding, diagnose
from tao.admin.diagnosis_facts import gather_facts
from tao.cli.connection import state_folder, target_of
from tao.cli.frame import run, show
from tao.cli.logins import database_tls
from tao.cli.options import given, region_options
from tao.replication.accounts import Account
from tao.terminal import counted, text_of


@click.command()
@click.option(
    "--settings",
    "settings_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The settings file of a server of this machine, whose files and folders are checked. May be repeated.  "
    "[default: those of the development cluster]",
)
@region_options
def doctor(settings_files: tuple[Path, ...]) -> int:
    """Look for the usual mistakes of an installation, and say what to do about each.

    Checks the ports, clocks, versions, topologies and schemas of all servers; versions and options of the databases,
    when TAO_ADMIN_PASSWORD is set; file rights and disk room of this machine, for each --settings. `tao status` shows
    what is wrong at this moment. Exit status 1 when something is wrong.
    """
    password = os.environ.get("TAO_ADMIN_PASSWORD", "")
    administrator = Account("tao_admin", password, database_tls()) if password else None
    target = target_of()
    if given("connect") is None:
        from tao.devcluster.certificates import cluster_accounts

        folder = state_folder()
        administrator = cluster_accounts(folder, folder.require()).administrator
        settings_files = settings_files or tuple(sorted((folder.path / "servers").glob("*.yaml")))

    async def work() -> list[Finding]:
        return diagnose(await gather_facts(await current_topology(target), administrator, settings_files))

    findings = run(work())
    show(findings, lambda: _print(findings))
    return int(any(finding.problems for finding in findings))


def _print(findings: list[Finding]) -> None:
    for finding in findings:
        click.echo(f"{finding.check}: {_state(finding)}")
        for each in finding.problems:
            click.echo(f"  {text_of(each.subject)}: {text_of(each.problem)}\n    -> {text_of(each.remedy)}")


def _state(finding: Finding) -> str:
    if finding.problems:
        return counted(len(finding.problems), "problem")
    silent = ", ".join(finding.unanswered) + (" does not answer" if len(finding.unanswered) == 1 else " do not answer")
    if finding.examined:
        return f"ok ({finding.examined} looked at{f'; {silent}' if finding.unanswered else ''})"
    return f"not checked: {silent}" if finding.unanswered else "not checked, see --help"
