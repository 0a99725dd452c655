"""Names, routes and links between nodes."""
