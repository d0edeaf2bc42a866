"""Types of objects and associations: the schema file, the registry, inverse pairs, and the codec of fields.

Types are numbers on the wire and in the store; names exist here, in the SDK and in the CLI. Fields travel as one
msgpack map keyed by field number, so that adding a field is safe while serving and an unknown one survives a rewrite.
No I/O beyond text handed in: reading the file and watching it for changes belongs to the callers.
"""
