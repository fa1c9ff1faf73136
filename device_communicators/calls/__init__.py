"""Parts of a call that all transports share: its description, record, tensors, arithmetic and pending work.

May import `base` only.
"""
