"""The ground of both packages: errors, settings, limits of the process, forks, the host, threads, torch's stores.

Every room may import it; it imports none.
"""
