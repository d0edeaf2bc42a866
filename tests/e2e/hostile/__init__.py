"""Invalid and hostile requests: a package, so that its files share a cluster."""
