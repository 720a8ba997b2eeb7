"""Pulsar's binary protocol: frames and commands."""
