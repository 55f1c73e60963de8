"""What makes pages of the documentation; not part of the package."""
