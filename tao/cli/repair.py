"""`tao repair`: find edges without their inverse, left-over intents and wrong counts, and have them repaired."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tao.admin.documents import type_name
from tao.cli.connection import reader_login, tls_of_command
from tao.cli.frame import ask, run
from tao.cli.options import database_options, yes_option
from tao.terminal import Counting, counted, print_json, print_table

if TYPE_CHECKING:
    from tao.admin.access import ReaderLogin
    from tao.admin.repair import BrokenPair, Faults, Repairs, WrongCount
    from tao.model.rows import IntentRow
    from tao.schema.registry import Schema

_MAX_SHOWN = 50


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be repaired.")
@yes_option
@click.option("--only", type=click.Choice(["inverses", "counts"]), help="Look only for these faults.  [default: both]")
@database_options
def repair(dry_run: bool, yes: bool, only: str | None, token: str, as_json: bool, **login: Any) -> int:
    """Find edges whose inverse is missing or differs, and lists whose count is wrong, and repair them.

    Of a pair that disagrees the edge at the smaller id is the truth: it is copied to the larger id, and an edge that
    the smaller id does not have is DELETED at the larger id. The column "repair" says which. A list is counted again.
    The leaders make the repairs. They settle what their own failures left half done continuously; this command finds
    all other faults, and what was left half done for more than a minute.

    Exit status 1 when a fault was not repaired.
    """
    from tao.admin.repair import Repairs

    found = reader_login(**login)
    faults = run(_find(found, token, only))
    if not as_json:
        _show(faults, found.schema)
    repairs = Repairs()
    if faults.any and not dry_run:
        deletions = sum(pair.deletes for pair in faults.pairs)
        deleting = counted(deletions, "edge") if deletions else "nothing"
        kinds = ((faults.intents, "intent"), (faults.counts, "count"))
        also = "".join(f" and {counted(len(each), one)}" for each, one in kinds if each)
        ask(f"Repair {counted(len(faults.pairs), 'pair')}{also}, deleting {deleting}?", yes)
        repairs = run(_repair(found, token, faults))
    if as_json:
        _print(faults, repairs, found.schema)
    else:
        _summarize(faults, repairs, only)
    return 0 if repairs.complete(faults) else 1


async def _find(login: ReaderLogin, token: str, only: str | None) -> Faults:
    from tao.admin.access import access_of
    from tao.admin.repair import find_faults

    with Counting("rows read") as counting:
        async with access_of(login, token, tls_of_command()) as access:
            return await find_faults(
                access,
                login.schema,
                inverses=only != "counts",
                counts=only != "inverses",
                on_edges=lambda shard, edges: counting.show(f"edges of shard {shard}", edges),
                on_lists=lambda shard, lists: counting.show(f"lists of shard {shard}", lists),
            )


async def _repair(login: ReaderLogin, token: str, faults: Faults) -> Repairs:
    from tao.admin.access import access_of
    from tao.admin.repair import repair_faults

    async with access_of(login, token, tls_of_command()) as access:
        return await repair_faults(access, faults)


def _summarize(faults: Faults, repairs: Repairs, only: str | None) -> None:
    from tao.admin.repair import total_repaired

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


def _print(faults: Faults, repairs: Repairs, schema: Schema) -> None:
    """Print JSON. The keys "mended" and "mending" are former names of "repaired" and "repair"."""
    import dataclasses

    from tao.admin.repair import total_repaired

    leaders = repairs.by_leader()
    repaired = total_repaired(repairs.pairs)
    print_json(
        {
            "old_intents": [_intent_as_json(each, schema) for each in faults.intents],
            "settled": total_repaired(repairs.intents),
            "broken": [_pair_as_json(pair, schema) for pair in faults.pairs],
            "repaired": repaired,
            "mended": repaired,
            "wrong_counts": [_count_as_json(each, schema) for each in faults.counts],
            "recounted": total_repaired(repairs.counts),
            "may_be_more": faults.is_cut,
            "leaders": [{**dataclasses.asdict(each), "mended": each.repaired} for each in leaders],
            "unreachable": [each.server for each in leaders if each.error],
        }
    )


def _intent_as_json(each: IntentRow, schema: Schema) -> dict[str, object]:
    return {
        "low_id": each.low_id,
        "high_id": each.high_id,
        "atypes": [type_name(schema, atype) for atype in each.atypes],
        "created_unix_ms": each.created_unix_ms,
    }


def _pair_as_json(pair: BrokenPair, schema: Schema) -> dict[str, object]:
    return {
        "low_id": pair.low_id,
        "high_id": pair.high_id,
        "atype": type_name(schema, pair.atype),
        "fault": pair.fault,
        "repair": pair.repair,
        "mending": pair.repair,
    }


def _count_as_json(each: WrongCount, schema: Schema) -> dict[str, object]:
    return {"id1": each.id1, "atype": type_name(schema, each.atype), "stored": each.stored, "counted": each.counted}


def _show(faults: Faults, schema: Schema) -> None:
    if faults.intents:
        print_table(
            ("smaller id", "larger id", "types", "left over since"),
            [
                (each.low_id, each.high_id, ", ".join(type_name(schema, atype) for atype in each.atypes), _time(each))
                for each in faults.intents[:_MAX_SHOWN]
            ],
        )
        _show_rest(len(faults.intents))
    _show_pairs(faults.pairs, schema)
    _show_counts(faults.counts, schema)


def _time(intent: IntentRow) -> str:
    return datetime.fromtimestamp(intent.created_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _show_pairs(pairs: Sequence[BrokenPair], schema: Schema) -> None:
    if pairs:
        print_table(
            ("smaller id", "larger id", "type", "fault", "repair"),
            [
                (pair.low_id, pair.high_id, type_name(schema, pair.atype), pair.fault, pair.repair)
                for pair in pairs[:_MAX_SHOWN]
            ],
        )
        _show_rest(len(pairs))


def _show_counts(counts: Sequence[WrongCount], schema: Schema) -> None:
    if counts:
        print_table(
            ("id", "type", "count stored", "edges"),
            [(each.id1, type_name(schema, each.atype), each.stored, each.counted) for each in counts[:_MAX_SHOWN]],
            right=("count stored", "edges"),
        )
        _show_rest(len(counts))


def _show_rest(number: int) -> None:
    if number > _MAX_SHOWN:
        click.echo(f"… and {number - _MAX_SHOWN:,} more")
