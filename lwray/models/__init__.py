"""Networks written here, and the counter-based randomness that they draw from."""
