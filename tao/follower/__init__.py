"""The cache server that clients talk to: it answers from its memory, and asks its region's leader for the rest.

The path of a request can be read from the file names: service, miss_path and subscriptions here, reads and writes in
`tao.serving`. Only server puts parts together. A hit is one synchronous call; a follower reads a database only for a
miss while no leader can serve it.
"""
