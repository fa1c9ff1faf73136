"""The typed codec of messages: the values that it knows, types that callers register, limits on what it decodes.

May import the lower package's errors and settings, and its compiled library.
"""
