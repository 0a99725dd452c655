"""What runs in the ranks of the commands that measure collectives."""
