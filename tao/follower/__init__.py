"""The cache server that clients talk to: answers from its memory, asks its region's leader for the rest.

A request's way can be read by file names: service, read_path, miss_path, write_path, maintenance_path. server is the
only module that wires parts together. A hit is one synchronous call; it never meets a database.
"""
