"""The store that `launch` serves: torch's store calls over an authenticated connection.

May import the lower package's `base` only.
"""
