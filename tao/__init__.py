"""A geographically distributed, read-through and write-through graph cache over sharded MySQL.

The packages stand on floors and import only from lower ones:

    0  model                                       ids, values, versions, messages, errors, ports
    1  schema                                      types of objects and associations, field codec
    2  cache, routing, planning                    what a server remembers, who has a shard, what a write does
    3  observability                               metrics, logs, the story of a key
    4  wire, storage, delivery, topology           transports, SQL, outboxes, topology documents
    5  peers, runtime                              calls to other servers, a server process's life
    6  follower, leader, tailer, watcher, client   one package a role, and the SDK
    7  devcluster                                  a whole cluster on one machine
    8  cli                                         the operator's commands

Floors 0-2 decide and do no I/O; the floors above do what they decide.
"""

__version__ = "0.1.0"
