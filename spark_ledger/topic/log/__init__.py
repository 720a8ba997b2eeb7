"""The log of a topic: records, state, intents, blobs."""
