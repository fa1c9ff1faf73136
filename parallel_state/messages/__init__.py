"""Objects and tensor dicts: the coordinator's calls, the messenger, its transports, the wire format, the codec.

May import `collectives`, for the ops of a dict with a spec, and the lower package.
"""
