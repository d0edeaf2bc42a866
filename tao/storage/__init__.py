"""The data path to MySQL and MariaDB: migrations, pools, consistent reads and write transactions.

It implements the store ports of tao.model with one schema per shard. Values are bound and never pasted, every query has
a deadline and every queue a bound. tao.planning decides what to write.

From the bottom: `result_packets` parses what a server answers, `server_connection` sends commands, `session` runs
statements under a deadline. `dialect` knows the differences of the servers and `failures` translates their errors.
`pools` lend sessions. `read_plan` and `write_statements` are pure: they build statements and parse rows. `reads`,
`writes` and `scans` are the interface for other packages, and `migrations` runs the files of ``sql/``.
"""
