"""What an operator does to a cluster: verify, repair, load, export, drain, invalidate, replicate and promote.

`tao.cli` parses options, calls one function here and prints what it returns. Nothing here writes to a terminal, so
tests, simulations and load tests call the same functions.
"""
