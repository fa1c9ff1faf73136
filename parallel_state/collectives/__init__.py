"""Calls on tensors: the registered ops with gradients, the checks of arguments, the coordinator's methods."""
