"""The versioned topology document: which servers, tiers, regions, databases and shard mappings exist.

This package reads, checks, watches and changes the document by compare-and-set, behind one port: a watched file on one
machine, a coordination service on many. Routes are computed from the document in tao.routing.
"""
