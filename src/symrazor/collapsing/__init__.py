"""A relaxed network in, a plain one out: which paths to drop, what it saves, its files."""
