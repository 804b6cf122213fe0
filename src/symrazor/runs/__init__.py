"""A run as a TOML file and as a folder."""
