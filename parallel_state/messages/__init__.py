"""Sends and receives objects and tensor dicts in a group."""
