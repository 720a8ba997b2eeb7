"""The broker: Pulsar's own clients write and read topics through it."""
