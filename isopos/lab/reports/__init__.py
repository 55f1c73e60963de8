"""What is shown of runs: tables, pictures, pages, progress."""
