"""The topic layer's small scopes, explored completely: see docs/exhaustive.md."""
