"""The way into the world: the environment, interfaces, rendezvous, and a watch over all of it.

May import `store` and the lower package.
"""
