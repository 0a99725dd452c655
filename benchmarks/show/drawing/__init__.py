"""Pictures of a schedule: as text, as a space-time diagram, as an animated page."""
