"""Loads CSV files into the graph: resumable, and idempotent when repeated.

`session` is the entry; `csv_files` reads records and writes rejected ones, `records` turns them into objects and edges,
`key_map` keeps ids and progress, and `pipeline` writes several batches at once.
"""
