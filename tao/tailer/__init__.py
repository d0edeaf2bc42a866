"""The tailer: one process per region and database server, which turns its binlog into maintenance messages.

    binlog → `reader` (a thread) → `transactions` (events → transactions) → `tao.planning.row_events` (pure)
           → `delivery_path` (one `leader_outbox` per leader) → acknowledged → the checkpoint in `tail_path`

`tail_path` is the loop that moves transactions along this way and measures the region's replication lag. `continuity`
continues shards that get another leader. `server` wires the parts. Delivery is at least once: a position is stored when
every leader has acknowledged everything before it, and versions make the messages that a restart repeats harmless.
Changes that cannot be followed (a purged binlog, undecodable events) become bulk invalidations, so that none is
silently lost.
"""
