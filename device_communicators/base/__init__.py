"""Basics of both packages: errors, settings, limits, forks, the host, threads, torch's stores and private names.

Every other package may import this one. It imports none of them.
"""
