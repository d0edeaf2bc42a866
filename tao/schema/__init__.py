"""Types of objects and associations: the schema file, the registry, inverse pairs, and the codec of fields.

The wire and the store know types by number; names exist here, in the SDK and in the CLI. Fields travel as one
msgpack map keyed by field number, so that a field can be added while serving and an unknown field survives a
rewrite. The package does no I/O: its callers read the schema file and watch it for changes."""
