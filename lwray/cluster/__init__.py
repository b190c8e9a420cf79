"""Where things run: everything that needs Ray."""
