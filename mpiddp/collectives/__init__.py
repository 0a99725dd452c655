"""Runs a schedule on buffers: compiled to instructions, sent over a transport."""
