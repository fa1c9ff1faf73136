"""Calls on tensors: the registered ops with their gradients, the checks of a call, the coordinator's methods.

May import `torch_internals`, and the lower package.
"""
