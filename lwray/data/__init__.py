"""From what the user names to rows: sources, tokenising, shards, order, loading."""
