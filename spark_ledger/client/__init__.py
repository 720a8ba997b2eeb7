"""Blocking faces of the asyncio core, for threads, notebooks and Spark's Python workers."""
