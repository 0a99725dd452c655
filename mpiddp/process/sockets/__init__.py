"""Listening, connecting, and waiting for both."""
