"""Set arithmetic on association lists: expressions, cursors, and an evaluator without I/O.

An expression combines lists by ``&``, ``|`` and ``-``, and denotes a map of id2 to one edge. Every expression is
ordered as a list is: by time, then id2, descending. That makes one place, the time and id2 of the last edge that was
examined, enough to continue any expression.

The evaluator is a generator. It yields batches of the queries that lists answer (`tao.model.queries`: a page after a
place, which of these ids, how many edges) and is sent the encoded answers. What can read lists can drive it: the SDK
over its own reads, and a follower over its read service.

Read in this order: `expression`, `steps`, `streams`, `merge`, `evaluation`.
"""
