"""Tools that generate and check the documentation; not part of the package."""
