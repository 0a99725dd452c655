"""A record as tables, pictures, pages and slides; progress, and the output of a command."""
