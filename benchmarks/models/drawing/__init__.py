"""Pictures of a schedule: in words and letters, as a space-time diagram, as a page that moves."""
