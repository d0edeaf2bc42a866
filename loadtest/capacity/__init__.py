"""What one server is good for, what more servers and more data change about it, and what that makes of a deployment."""
