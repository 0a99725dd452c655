"""A record in, a verdict out: is A faster than B, which rank is slow, what became slower."""
