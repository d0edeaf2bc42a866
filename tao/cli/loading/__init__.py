"""Bulk loading: CSV files into the graph, through followers like any client.

A load may be cut off anywhere and repeated at any time. External keys get ids, which are reserved and noted in a SQLite
file *before* the write, so a repeat writes the same objects and edges, and the writes of the graph are idempotent. How
far a load has come is noted in the same file, always as "everything up to here is acknowledged".
"""
