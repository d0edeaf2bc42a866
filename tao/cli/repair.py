"""`tao repair`: edges without their inverse, intents left over, and wrong counts of lists, found and mended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tao.cli.checking.options import database_options, name_of
from tao.cli.frame import ask, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tao.cli.checking.counts import WrongCount
    from tao.cli.checking.inverses import BrokenPair
    from tao.cli.checking.mending import LeaderResult
    from tao.cli.export_scan import ReaderLogin
    from tao.model.rows import IntentRow
    from tao.schema.registry import Schema

_SHOWN = 50


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be mended.")
@click.option("--yes", is_flag=True, help="Mend without asking.")
@click.option("--only", type=click.Choice(["inverses", "counts"]), help="Look for these alone.  [default: both]")
@database_options
def repair(dry_run: bool, yes: bool, only: str | None, token: str, as_json: bool, **login: Any) -> int:
    """Find edges whose inverse is missing or differs and lists whose count is wrong, and mend them.

    Of a pair that disagrees the edge at the smaller id is the truth: the leader that coordinates the pair copies it to
    the larger id, and an edge that the smaller id does not have is DELETED at the larger id. The column "mending" says
    which. A list is counted anew by the leader that owns it. Leaders settle what a failure of their own left half done
    continuously; this finds all others, and what was left half done for more than a minute.

    Exit status 1 when something was left as it is.
    """
    from tao.cli.export_scan import reader_login
    from tao.cli.output import counted

    login_found = reader_login(**login)
    found = Findings()
    if only != "counts":
        found.intents = run(_find_intents(login_found, token))
        found.pairs = run(_find(login_found, token))
    if only != "inverses":
        found.counts = run(_find_counts(login_found, token))
    if not as_json:
        _show(found, login_found.schema)
    if found.any and not dry_run:
        deletions = sum(pair.deletes for pair in found.pairs)
        deleting = counted(deletions, "edge") if deletions else "nothing"
        kinds = ((found.intents, "intent"), (found.counts, "count"))
        also = "".join(f" and {counted(len(each), one)}" for each, one in kinds if each)
        ask(f"Mend {counted(len(found.pairs), 'pair')}{also}, deleting {deleting}?", yes)
        # Intents first: their pairs may be among those that disagree.
        found.settled = run(_settle(login_found, token, found.intents)) if found.intents else []
        found.mended = run(_mend(login_found, token, found.pairs)) if found.pairs else []
        found.recounted = run(_mend_counts(login_found, token, found.counts)) if found.counts else []
    if as_json:
        _print(found, login_found.schema)
    else:
        _summarize(found, only)
    return 0 if found.all_mended else 1


@dataclass(slots=True)
class Findings:
    """What was found, and what became of it, by leader."""

    intents: list[IntentRow] = field(default_factory=list)
    pairs: list[BrokenPair] = field(default_factory=list)
    counts: list[WrongCount] = field(default_factory=list)
    settled: list[LeaderResult] = field(default_factory=list)
    mended: list[LeaderResult] = field(default_factory=list)
    recounted: list[LeaderResult] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Whether there is something to mend."""
        return bool(self.intents or self.pairs or self.counts)

    @property
    def is_cut(self) -> bool:
        """Whether there may be more than was looked for."""
        from tao.cli.checking.mending import MAX_FOUND

        return max(len(self.intents), len(self.pairs), len(self.counts)) >= MAX_FOUND

    @property
    def all_mended(self) -> bool:
        """Nothing was left as it is."""
        kinds = ((self.intents, self.settled), (self.pairs, self.mended), (self.counts, self.recounted))
        return not self.is_cut and all(len(found) == _total(results) for found, results in kinds)

    def leaders(self) -> list[LeaderResult]:
        """Who was asked."""
        from tao.cli.checking.mending import together

        return together([*self.settled, *self.mended, *self.recounted])


def _total(results: Sequence[LeaderResult]) -> int:
    return sum(each.mended for each in results)


def _summarize(found: Findings, only: str | None) -> None:
    from tao.cli.output import counted

    if found.intents:
        click.echo(f"{counted(len(found.intents), 'intent')} left over; {_total(found.settled):,} settled")
    if only != "counts":
        pairs = found.pairs
        disagree = f"{counted(len(pairs), 'pair')} {'disagrees' if len(pairs) == 1 else 'disagree'}"
        click.echo(f"{disagree}; {_total(found.mended):,} mended" if pairs else "every edge has its inverse")
    if only != "inverses":
        counts = found.counts
        wrong = f"{counted(len(counts), 'count')} {'is' if len(counts) == 1 else 'are'} wrong"
        click.echo(f"{wrong}; {_total(found.recounted):,} mended" if counts else "every list has its count")
    if found.is_cut:
        click.echo("there may be more of them: repeat")
    for each in found.leaders():
        if each.error:
            click.echo(f"{each.server}: {each.mended:,} of {each.asked:,} mended: {each.error}", err=True)


def _print(found: Findings, schema: Schema) -> None:
    import dataclasses

    from tao.cli.output import print_json

    leaders = found.leaders()
    print_json(
        {
            "old_intents": [_intent_as_json(each, schema) for each in found.intents],
            "settled": _total(found.settled),
            "broken": [_pair_as_json(pair, schema) for pair in found.pairs],
            "mended": _total(found.mended),
            "wrong_counts": [_count_as_json(each, schema) for each in found.counts],
            "recounted": _total(found.recounted),
            "may_be_more": found.is_cut,
            "leaders": [dataclasses.asdict(each) for each in leaders],
            "unreachable": [each.server for each in leaders if each.error],
        }
    )


def _intent_as_json(each: IntentRow, schema: Schema) -> dict[str, object]:
    return {
        "low_id": each.low_id,
        "high_id": each.high_id,
        "atypes": [name_of(schema, atype) for atype in each.atypes],
        "created_unix_ms": each.created_unix_ms,
    }


def _pair_as_json(pair: BrokenPair, schema: Schema) -> dict[str, object]:
    return {
        "low_id": pair.low_id,
        "high_id": pair.high_id,
        "atype": name_of(schema, pair.atype),
        "fault": pair.fault,
        "mending": pair.mending,
    }


def _count_as_json(each: WrongCount, schema: Schema) -> dict[str, object]:
    return {"id1": each.id1, "atype": name_of(schema, each.atype), "stored": each.stored, "counted": each.counted}


def _show(found: Findings, schema: Schema) -> None:
    from tao.cli.output import print_table

    if found.intents:
        print_table(
            ("smaller id", "larger id", "types", "left over since"),
            [
                (each.low_id, each.high_id, ", ".join(name_of(schema, atype) for atype in each.atypes), _time(each))
                for each in found.intents[:_SHOWN]
            ],
        )
        _show_rest(len(found.intents))
    _show_pairs(found.pairs, schema)
    _show_counts(found.counts, schema)


def _time(intent: IntentRow) -> str:
    return datetime.fromtimestamp(intent.created_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _show_pairs(pairs: Sequence[BrokenPair], schema: Schema) -> None:
    from tao.cli.output import print_table

    if pairs:
        print_table(
            ("smaller id", "larger id", "type", "fault", "mending"),
            [
                (pair.low_id, pair.high_id, name_of(schema, pair.atype), pair.fault, pair.mending)
                for pair in pairs[:_SHOWN]
            ],
        )
        _show_rest(len(pairs))


def _show_counts(counts: Sequence[WrongCount], schema: Schema) -> None:
    from tao.cli.output import print_table

    if counts:
        print_table(
            ("id", "type", "count stored", "edges"),
            [(each.id1, name_of(schema, each.atype), each.stored, each.counted) for each in counts[:_SHOWN]],
            right=("count stored", "edges"),
        )
        _show_rest(len(counts))


def _show_rest(number: int) -> None:
    if number > _SHOWN:
        click.echo(f"… and {number - _SHOWN:,} more")


async def _find(login: ReaderLogin, token: str) -> list[BrokenPair]:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.inverses import find_broken_pairs
    from tao.cli.waiting import Counting

    with Counting("edges looked at") as counting:
        async with access_of(login, token) as access:
            return await find_broken_pairs(
                access.routes,
                login.schema,
                access.scans,
                access.store,
                on_progress=lambda shard, edges: counting.show(f"shard {shard}", edges),
            )


async def _find_counts(login: ReaderLogin, token: str) -> list[WrongCount]:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.counts import find_wrong_counts
    from tao.cli.waiting import Counting

    with Counting("lists counted") as counting:
        async with access_of(login, token) as access:
            return await find_wrong_counts(
                access.routes,
                login.schema,
                access.patient_scans,
                on_progress=lambda shard, lists: counting.show(f"shard {shard}", lists),
            )


async def _find_intents(login: ReaderLogin, token: str) -> list[IntentRow]:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.intents import OLD_SECONDS, find_old_intents

    before = int((time.time() - OLD_SECONDS) * 1000)
    async with access_of(login, token) as access:
        return await find_old_intents(access.routes, access.intents, before_unix_ms=before)


async def _settle(login: ReaderLogin, token: str, intents: Sequence[IntentRow]) -> list[LeaderResult]:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.intents import settle

    async with access_of(login, token) as access:
        return await settle(access.routes, access.links, intents)


async def _mend(login: ReaderLogin, token: str, pairs: Sequence[BrokenPair]) -> list[LeaderResult]:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.inverses import mend

    async with access_of(login, token) as access:
        return await mend(access.routes, access.links, pairs)


async def _mend_counts(login: ReaderLogin, token: str, counts: Sequence[WrongCount]) -> list[LeaderResult]:
    from tao.cli.checking.access import access_of
    from tao.cli.checking.counts import mend_counts

    async with access_of(login, token) as access:
        return await mend_counts(access.routes, access.links, counts)
