"""Parts of a call for all transports: description, records, tensor memory, reduction arithmetic, pending work."""
