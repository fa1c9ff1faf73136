"""`launch`: starts ranks on this host, and returns what each of them returned.

May import `store`, `startup` and the package's root.
"""
