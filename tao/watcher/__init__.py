"""Who notices that a server is gone, and who makes another one master (DESIGN.md §9).

`promotion_plan` decides, from what the servers of a replication set say, whether one may be promoted and which;
`promotion` does it, by the operator's command or for the watcher, in steps that may each be the last one: the next run
finishes or undoes what an interrupted one has begun, because what has happened is read from the servers and the
topology, and nowhere else. The watcher itself (`server`) asks every server how it does, keeps the ``down`` marks of the
topology, renews the masters' leases, and has a lost master replaced.
"""
