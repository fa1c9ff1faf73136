"""Interfaces of other projects: each module has one project's names, signatures and return types."""
