"""What the KV cache of the simulated engines holds: whose text a prompt goes on from, and who is told of blocks."""
