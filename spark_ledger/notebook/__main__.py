"""`python -m spark_ledger.notebook`: the commands of spark_ledger_demo/notebook."""

from spark_ledger_demo.notebook.commands import app

if __name__ == "__main__":
    app()
