"""Plan what a write does to stored rows, without I/O: existing rows and writes in, new rows and changesets out.

The invariants of a write transaction are decided and tested here: a version rises by exactly one per transaction, a
list's count equals its number of edges, and an invalid write fails alone. `row_events` turns row events of the
binlog into maintenance messages with the same function, so that a leader and a tailer derive identical changesets."""
