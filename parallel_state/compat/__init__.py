"""Interfaces of other projects: each module has one project's names, signatures and return types.

All of them use the same groups, those of `parallel_state.state`. These modules may import everything but `tools` and
`launch`; no other package imports them.
"""
