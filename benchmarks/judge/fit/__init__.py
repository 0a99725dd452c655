"""α, β and γ of a machine, from messages and additions that were measured."""
