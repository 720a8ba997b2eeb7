"""The main job: a year of real flights through a replicated ledger, by Spark, exactly once."""
