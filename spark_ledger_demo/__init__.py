"""The demo, a year of real flights through a replicated topic by Spark, and the notebook runner.

Always true: they are users of the engine, which runs without them. Only the command line
(`spark-ledger demo`, `python -m spark_ledger.notebook`) imports them, and when it runs.
"""
