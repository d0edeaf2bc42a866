"""etcd, where the documents and locks of a cluster may be kept: where it is, how to connect, and a client of the few
calls that are needed. What is stored there is said in tao.topology and tao.replication.locks.
"""
