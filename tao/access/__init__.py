"""Rights: which caller may do what with which types. The rules are a document, compiled for the servers that check
them."""
