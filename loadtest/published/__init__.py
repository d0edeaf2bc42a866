"""Published workloads: what production systems reported of their requests and graphs, and generators that reproduce
it."""
