"""Calls on tensors: methods, argument checks, registered ops with gradients."""
