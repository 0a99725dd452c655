"""Commands that measure nothing: they prove, price, explain and simulate schedules."""
