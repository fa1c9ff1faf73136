"""The neighbours' shapes: each module has one project's names, signatures and return types, over the one state.

May import everything but `tools` and `launch`; nobody imports it.
"""
