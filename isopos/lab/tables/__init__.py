"""Papers' tables, one TOML each, and their loader."""
