"""The ground of both packages: errors, settings, limits, forks, the host, threads, torch's stores and private names.

Every room may import it; it imports none.
"""
