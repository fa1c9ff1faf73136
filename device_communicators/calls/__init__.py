"""Code that all transports use: descriptions and records of calls, tensor memory, reductions, pending work."""
