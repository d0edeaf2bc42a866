"""The capacity of one server, of more servers and with more data, and the size of a deployment."""
