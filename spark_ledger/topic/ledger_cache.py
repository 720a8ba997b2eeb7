"""Open task ledgers kept from batch to batch: a thousand small batches are not a thousand ledgers.

Always true: a ledger belongs to one intent, topic and policy and is used by one task at a time;
it is closed after 30 s idle, when it is full or old, or when its query goes on under another run.
"""
