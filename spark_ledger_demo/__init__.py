"""The demo, a year of real flights through a replicated topic by Spark, and the notebook runner.

Always true: both are users of the engine, which runs without them. Only `spark-ledger demo` and
spark_ledger.notebook, the name by which users know the runner, import them.
"""
