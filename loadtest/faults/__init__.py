"""Fault runs: a cluster under load while a plan of faults is carried out, and checks of what clients saw.

A scenario is a plan (`loadtest.faults.plan`) and its checks. `chaos` and `rolling` share the whole harness
(`loadtest.faults.harness`); `converge`, `recovery` and `master_lost` have a load of their own.
"""
