"""Parts of `bench/recovery.py`."""
