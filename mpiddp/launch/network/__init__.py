"""A node's network interfaces, and which of them are to be used."""
