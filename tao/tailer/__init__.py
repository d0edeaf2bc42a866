"""The tailer: one process per region and database server; makes maintenance messages of its binlog (DESIGN.md §7).

    binlog → `reader` (the one thread) → `transactions` (events → transactions) → `tao.planning.row_events` (pure)
           → `delivery_path` (a lane per leader) → acknowledged → `checkpoint`

`tail_path` is the loop that moves them on, `lag` says how far behind the region is, `server` wires. Everything is at
least once: a position is stored when every leader has acknowledged what came before it, and what a restart repeats is
recognised by its versions. What cannot be followed (a purged binlog, events that nobody can read) ends in bulk
invalidation, never in silence.
"""
