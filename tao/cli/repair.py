"""`tao repair`: find edges without their inverse, left-over intents and wrong counts, and have them repaired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import click

from tao.admin.access import ReaderLogin
from tao.admin.documents import type_name
from tao.admin.repair import Faults, Repairs, find_faults, repair_faults, total_repaired
from tao.cli.frame import ask, run, show
from tao.cli.logins import databases_of_command, reader_login
from tao.cli.options import given, json_option, reader_options, yes_option
from tao.schema.registry import Schema
from tao.terminal import Counting, counted, fields_of, print_records

_MAX_SHOWN = 50


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be repaired.")
@yes_option
@click.option("--only", type=click.Choice(["inverses", "counts"]), help="Look only for these faults.  [default: both]")
@reader_options
@json_option
def repair(dry_run: bool, only: str | None) -> int:
    """Find edges whose inverse is missing or differs, and lists whose count is wrong, and repair them.

    Of a pair that disagrees the edge at the smaller id is the truth: it is copied to the larger id, and an edge that
    the smaller id does not have is DELETED at the larger id. The ends of an edge with states are joined instead: the
    newest operation wins. The column "repair" says which. A list is counted again.
    The leaders make the repairs. They settle what their own failures left half done continuously; this command finds
    all other faults, and what was left half done for more than a minute.

    Exit status 1 when a fault was not repaired.
    """
    login = reader_login()
    faults = run(_find(login, only))
    document = _document_of(faults, login.schema)
    if not given("as_json"):
        _print_faults(document)
    repairs = Repairs()
    if faults.any and not dry_run:
        deletions = sum(pair.deletes for pair in faults.pairs)
        deleting = counted(deletions, "edge") if deletions else "nothing"
        kinds = ((faults.intents, "intent"), (faults.counts, "count"))
        also = "".join(f" and {counted(len(each), one)}" for each, one in kinds if each)
        ask(f"Repair {counted(len(faults.pairs), 'pair')}{also}, deleting {deleting}?")
        repairs = run(_repair(login, faults))
    leaders = repairs.by_leader()
    repaired = total_repaired(repairs.pairs)
    document |= {
        "settled": total_repaired(repairs.intents),
        "repaired": repaired,
        "mended": repaired,
        "recounted": total_repaired(repairs.counts),
        "leaders": [{**fields_of(each), "mended": each.repaired} for each in leaders],
        "unreachable": [each.server for each in leaders if each.error],
    }
    show(document, lambda: _summarize(faults, repairs, only))
    return 0 if repairs.complete(faults) else 1


async def _find(login: ReaderLogin, only: str | None) -> Faults:
    with Counting("rows read") as counting:
        async with databases_of_command(login) as access:
            return await find_faults(
                access,
                login.schema,
                inverses=only != "counts",
                counts=only != "inverses",
                on_edges=lambda shard, edges: counting.show(f"edges of shard {shard}", edges),
                on_lists=lambda shard, lists: counting.show(f"lists of shard {shard}", lists),
            )


async def _repair(login: ReaderLogin, faults: Faults) -> Repairs:
    async with databases_of_command(login) as access:
        return await repair_faults(access, faults)


def _document_of(faults: Faults, schema: Schema) -> dict[str, object]:
    """Return the faults as JSON. The keys "mended" and "mending" are former names of "repaired" and "repair"."""
    return {
        "old_intents": [
            {
                "low_id": each.low_id,
                "high_id": each.high_id,
                "atypes": [type_name(schema, atype) for atype in each.atypes],
                "created_unix_ms": each.created_unix_ms,
            }
            for each in faults.intents
        ],
        "broken": [
            {
                "low_id": pair.low_id,
                "high_id": pair.high_id,
                "atype": type_name(schema, pair.atype),
                "fault": pair.fault,
                "repair": pair.repair,
                "mending": pair.repair,
            }
            for pair in faults.pairs
        ],
        "wrong_counts": [
            {"id1": each.id1, "atype": type_name(schema, each.atype), "stored": each.stored, "counted": each.counted}
            for each in faults.counts
        ],
        "may_be_more": faults.is_cut,
    }


def _print_faults(document: Mapping[str, object]) -> None:
    for kind, hidden in (("old_intents", "created_unix_ms"), ("broken", "mending"), ("wrong_counts", "")):
        found = document[kind]
        assert isinstance(found, Sequence)
        rows = [{name: value for name, value in each.items() if name != hidden} for each in found[:_MAX_SHOWN]]
        for row, each in zip(rows, found, strict=False):
            if kind == "old_intents":
                created = datetime.fromtimestamp(each[hidden] / 1000, UTC)
                row["left over since"] = created.strftime("%Y-%m-%d %H:%M:%S UTC")
        print_records(rows)
        if len(found) > _MAX_SHOWN:
            click.echo(f"… and {len(found) - _MAX_SHOWN:,} more")


def _summarize(faults: Faults, repairs: Repairs, only: str | None) -> None:
    if faults.intents:
        click.echo(f"{counted(len(faults.intents), 'intent')} left over; {total_repaired(repairs.intents):,} settled")
    if only != "counts":
        pairs = faults.pairs
        disagree = f"{counted(len(pairs), 'pair')} {'disagrees' if len(pairs) == 1 else 'disagree'}"
        repaired = f"{disagree}; {total_repaired(repairs.pairs):,} repaired"
        click.echo(repaired if pairs else "every edge has its inverse")
    if only != "inverses":
        counts = faults.counts
        wrong = f"{counted(len(counts), 'count')} {'is' if len(counts) == 1 else 'are'} wrong"
        click.echo(f"{wrong}; {total_repaired(repairs.counts):,} repaired" if counts else "every list has its count")
    if faults.is_cut:
        click.echo("there may be more faults: repeat the command")
    for each in repairs.by_leader():
        if each.error:
            click.echo(f"{each.server}: {each.repaired:,} of {each.asked:,} repaired: {each.error}", err=True)
