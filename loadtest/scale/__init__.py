"""Scenario `scale`: a model of a large installation, in which one server of each role is real.

The whole shape does not fit one machine, so each role's real process runs among *stubs* of its neighbours: sessions and
servers in this process that speak the product's protocol, and do no work of their own. `installation` makes the
topology documents, `stubs` the neighbours; `roles` measures a follower and a leader among them, `slow_leader` a tailer,
`in_process` what needs a look inside the event loop, `cluster` what needs real databases. `figures` says what follows,
and `scenario` puts it together.
"""
