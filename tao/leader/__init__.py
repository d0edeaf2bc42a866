"""The cache server that uses the databases of its region: it fills caches, coordinates and commits writes.

A shard has one owning leader at a time, named together with a generation that every transaction checks. So two
leaders of one shard cost a retry and never a lost write. Modules named ``*_path`` handle the requests of one kind;
`server` puts the parts together."""
