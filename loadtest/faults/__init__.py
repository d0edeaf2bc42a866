"""Fault runs: a cluster under load while plans of faults are carried out, and checks of what clients saw.

A scenario is a cluster, a load and plans (`loadtest.faults.plan`), which the harness brings together
(`loadtest.faults.harness`). `chaos` and `rolling` have the recorded load (`loadtest.faults.load`), and the writes of
`converge` collide. `recovery` and `master_lost` measure how long clients wait after a crash.
"""
