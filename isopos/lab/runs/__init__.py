"""Run folders. Each file is written so that a kill at any moment leaves the old file or the new one."""
