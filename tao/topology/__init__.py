"""The versioned document that says which servers, tiers, regions, databases and shard mappings exist.

Reading, checking, watching and changing it by compare-and-set lie here, behind one port: a watched file on one
machine, a coordination service on many. What follows from the document for a shard is computed in tao.routing.
"""
