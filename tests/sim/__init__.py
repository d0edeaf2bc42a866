"""The cluster in one process, under virtual time and a seed: deterministic simulation (DESIGN.md §9, §15).

The real followers, leaders, tailers and SDK clients run here as their own wiring puts them together. What lies below
their ports is simulated: the event loop's time, the network, the databases with their replicas and binlogs, files. A
*plan* - operations, faults and times, all made from one number - is played on it while the invariants are checked.
The same plan gives the same trace, event for event, so a failure found once can be looked at as often as one likes,
and made smaller.

One reads from the top: `runs` (a seed's whole life) → `plans` (what will happen) → `world` (what it happens to) →
`substitutes` (what takes the place of sockets, files and MySQL) → `network`, `database`, `loop`. `checks` says what
must hold, `variants` breaks the product on purpose to see that the checks notice, `shrinking` makes a failure small.
"""
