"""Sends and receives of CPU tensors between ranks that share no memory, over a connection of each two.

May import `routing` and what is below it.
"""
