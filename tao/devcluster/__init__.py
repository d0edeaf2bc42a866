"""A whole cluster on one machine, for development, the demo and end-to-end tests.

Private database instances, leaders and follower tiers, each a process, in one state folder that survives a crash.
It uses the roles only through their commands and ports, as an operator would.
"""
