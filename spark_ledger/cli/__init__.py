"""The command line: `spark-ledger <noun> <verb>`; `nodes.py` has the nouns of processes."""
