"""The cache server that clients talk to: answers from its memory, asks its region's leader for the rest.

A request's way can be read by file names: service, miss_path, maintenance_path, with reads and writes as in
`tao.serving`. server is the only module that wires parts together. A hit is one synchronous call; only a miss while no
leader can serve meets a database.
"""
