"""A crash, a pause or a lost answer at every call that a verb of the topic layer makes.

Always true: a deed is prepared in the same way each time, so the calls of its process to the store
and to bookies are the same each time; for each call and each fate of the deed (fates.py) the
process meets that fate there, others go on and take over, it comes back if it can, and everything
is judged as in a simulation's run: by the log in the store, by what a fresh reader reads, by what
is left at rest.
"""
