"""One page of what was measured, and its pictures as slides."""
