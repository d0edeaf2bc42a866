"""Published workloads: what production systems said of their requests and their graphs, and generators that obey it."""
