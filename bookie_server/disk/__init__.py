"""Disks: the interface, the OS disk with its threads, identity and reserve."""
