"""`python -m parallel_state check`: tests whether a job will work here, and how fast.

`system` collects the `facts` of one rank. `meeting` exchanges them between all ranks before any group is created.
`links` and `traffic` measure. `rules` turns facts and measurements into findings, and `report` prints them.
"""
