"""Deterministic simulation: the whole cluster in one process, under virtual time and from a seed.

The real followers, leaders, tailers and SDK clients run here, put together by their own wiring. What lies below their
ports is simulated: the time of the event loop, the network, the databases with their replicas and binlogs, and files. A
*plan* (operations, faults and times, all made from one number) is played on this cluster while the invariants are
checked. The same plan gives the same trace, event for event, so a failure can be replayed as often as needed and made
smaller.

Read the modules in this order: `runs` (the whole life of a seed) → `plans` (what will happen) → `world` (the cluster
that it happens to) → `substitutes` (the replacements of sockets, files and MySQL) → `network`, `database`, `loop`.
`checks` holds the conditions that must hold, `variants` breaks the product on purpose to prove that the checks notice,
and `shrinking` makes a failing plan small.
"""
