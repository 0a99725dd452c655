"""Commands that launch nothing: they prove, price, explain, simulate and read records."""
