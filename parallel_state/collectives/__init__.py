"""Calls on tensors: the registered ops with their gradients, the checks of a call, the coordinator's methods.

May import the lower package only.
"""
