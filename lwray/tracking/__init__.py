"""What is remembered of a run: its directory, its journal, MLflow, the terminal, and how to look at it."""
