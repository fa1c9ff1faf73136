"""Measures several ways to do the same, each in processes of its own, in turns, and writes a page about it.

A candidate that fails is left out alone, with its reason; figures of a wrong answer are never printed or drawn.
"""
