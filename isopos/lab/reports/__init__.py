"""Reports of runs: tables, pictures, pages, progress."""
