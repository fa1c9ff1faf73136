"""What all transports use for a call: its description, records, tensor memory, reduction arithmetic and pending work.

May import `base` only.
"""
