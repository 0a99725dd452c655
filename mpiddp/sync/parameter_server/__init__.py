"""Parameter servers: ranks that hold the weights and update them."""
