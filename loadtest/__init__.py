"""Benchmarks: registered scenarios, each with a name, a set-up and a JSON result (`python -m loadtest`).

Figures that depend on the machine mean little alone, so each stands beside a yardstick measured in the same run: the
contestants of a comparison take turns round by round, and the medians of the rounds are compared. The load comes from
one process of its own (`loadtest.client_process`), so that the runner and its table cost no contestant anything.

`scenario` says what a scenario is, `catalogue` lists them. `rounds` lets contestants take turns and makes their
figures, `drivers` puts load on them, `dataset` and `published` say which, and `table` shows the figures.
"""
