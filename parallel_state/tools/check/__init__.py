"""`python -m parallel_state check`: will this job work here, and how fast? Facts of all ranks, rules over them, a page.

`facts` and `system` read what one rank knows; `meeting` brings the facts of all ranks together before any group is
made; `links` and `traffic` measure; `rules` turns all of it into findings; `page` shows them.
"""
