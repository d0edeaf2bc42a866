"""The cache server that talks to the databases of its region: fills caches, coordinates and commits writes.

A shard has one owning leader at a time, named with a generation that every transaction checks, so that two leaders
cost a retry and never a lost write. The same file names as in the follower tell a request's way; server wires.
"""
