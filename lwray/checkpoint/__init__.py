"""Law 4: one canonical state in, a committed directory out, and back, on any backend and any number of workers."""
