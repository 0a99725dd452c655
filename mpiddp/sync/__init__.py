"""How gradients become one: the session and the collectives, joined."""
