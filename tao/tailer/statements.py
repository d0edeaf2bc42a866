"""Which shards a statement in the binlog makes void: what it changed is not told by rows (DESIGN.md §7).

TRUNCATE and DROP take rows away without an event for each; a session may log its UPDATE as text. Such statements name
their tables, so a search for the schemas' names errs on the side of too many shards.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from tao.storage.names import shard_of_schema

_SHARD_NAME: Final = re.compile(r"\btao_[0-9]{5}\b")
_COMMENT: Final = re.compile(r"^(\s|/\*M?!\d*|/\*.*?\*/|--[^\n]*\n|#[^\n]*\n)+", re.DOTALL)
"""Of ``/*!40000 DROP …*/`` and ``/*M!… */`` only the head: servers run what is in them, and dumps are full of them."""
_HARMLESS: Final = frozenset(
    {"CREATE", "ALTER", "GRANT", "REVOKE", "FLUSH", "ANALYZE", "OPTIMIZE", "REPAIR", "SET", "COMMENT"}
)
"""First words of statements that leave the rows of a table as they are."""
_HARMFUL: Final = re.compile(r"\b(PARTITION|TABLESPACE|RENAME|OR\s+REPLACE|SET\s+STATEMENT)\b", re.IGNORECASE)
"""ALTER TABLE … TRUNCATE PARTITION, EXCHANGE PARTITION and IMPORT TABLESPACE change rows after all. So do a table that
is put in the place of another, CREATE OR REPLACE, and whatever MariaDB's SET STATEMENT … FOR has behind it."""

Boundary = Literal["begin", "commit", "rollback", "savepoint", "statement", "foreign commit"]


def boundary_of(text: str) -> Boundary:
    """What a statement means for the transaction that it stands in. "foreign commit": rows prepared under XA become
    effective, long after their events."""
    words = _without_comment(text)[:64].upper().rstrip("; \n").split()
    match words:
        case ["BEGIN", *_] | ["START", "TRANSACTION", *_] | ["XA", "START" | "BEGIN" | "END", *_]:
            return "begin"
        case ["XA", "COMMIT", *_]:
            return "foreign commit"
        case ["COMMIT", *_]:
            return "commit"
        case ["ROLLBACK", "TO", *_] | ["SAVEPOINT" | "RELEASE", *_]:
            return "savepoint"
        case ["ROLLBACK", *_] | ["XA", "ROLLBACK", *_]:
            return "rollback"
        case _:
            return "statement"


def shards_voided_by(text: str, default_schema: str) -> frozenset[int]:
    """The shards whose rows a statement may have changed. ``default_schema``: of the session that ran it."""
    words = _without_comment(text).split(maxsplit=1)
    if not words or (words[0].upper() in _HARMLESS and not _HARMFUL.search(text)):
        return frozenset()
    named = {shard_of_schema(name) for name in (default_schema, *_SHARD_NAME.findall(text))}
    return frozenset(shard for shard in named if shard is not None)


def _without_comment(text: str) -> str:
    return _COMMENT.sub("", text, count=1)
