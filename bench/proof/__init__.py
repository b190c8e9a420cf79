"""How `bench/invariance.py` takes runs over their legs, compares them and shows what came of it."""
