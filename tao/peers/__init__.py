"""Calls to other servers: batching, single flight, deadlines, retries within a budget, failover.

Each concern is a layer over one narrow interface, so that a role composes what it needs in its wiring place and
tests replace the bottom with a function. Which server to ask comes from tao.routing.
"""
