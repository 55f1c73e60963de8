"""The papers' tables: a TOML each, and what reads them."""
