"""The contract of a bookie: all that other packages may import of this one."""
