"""One step: passes, update, precision, clock."""
