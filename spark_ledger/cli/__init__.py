"""The command line: `spark-ledger <noun> <verb>`, one file per noun."""
