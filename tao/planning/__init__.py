"""What a write does to rows, decided without touching them: existing rows and writes in, rows and changesets out.

The write planner stands above the store port and carries the property tests: versions rise by exactly one for each
transaction, a list's count equals its edges, an invalid write fails alone. Row events of the binlog are turned into
maintenance messages here as well, so that a leader and a tailer derive the identical changeset from one function.
"""
