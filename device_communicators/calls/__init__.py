"""Helpers of all transports for a call: its description, records, tensor memory, reductions and pending work."""
