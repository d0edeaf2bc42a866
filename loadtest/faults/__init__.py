"""Fault runs: a cluster under load while plans of faults are carried out, and checks of what clients saw.

A scenario is a cluster, a load and plans (`loadtest.faults.plan`), which the harness brings together
(`loadtest.faults.harness`). `chaos` and `rolling` have the recorded load (`loadtest.faults.load`), `chaos` with
operations on edges with states beside it (`loadtest.faults.merged_edges`). The writes of `converge` collide, and those
of `cut_journals` are journaled on both sides of a cut line. `recovery` and `master_lost` measure how long clients wait
after a crash.
"""
