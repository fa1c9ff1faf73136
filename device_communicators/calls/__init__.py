"""Parts of a call for all transports: its description, records, tensor memory, reduction arithmetic and pending work.

May import `base` only.
"""
