"""The only package that contains SQL: migrations, pools, consistent reads and write transactions.

It implements the store port of tao.model over MySQL or MariaDB, one logical database per shard. Values are bound and
never pasted, every query has a deadline and every queue a bound. What to write is decided in tao.planning.

From below: `result_packets` (what a server answers, from bytes to rows), `server_connection` (the driver's, read by
these), `session` (statements under a deadline) and `dialect` (where the servers differ), `failures` (what their errors
mean), `pools`; `read_plan` and `write_statements` make the statements and take rows apart, and are pure; `reads`,
`writes` and `scans` are what others use. `migrations` runs the files of ``sql/``; `accounts` makes the service
accounts.
"""
