"""Basics of both packages: errors, settings, limits, forks, the host, threads, torch's stores and private names."""
