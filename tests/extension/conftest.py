"""What is here is not part of isopos: each file stands for a user's own, and is imported where a test asks for it."""

collect_ignore_glob = ["toy_*"]
