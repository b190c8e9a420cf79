"""Where bytes lie: a directory, or an object store by fsspec URL, behind one small interface."""

from lwray.store.store import Store, open_store

__all__ = ["Store", "open_store"]
