"""Run folders: what a run leaves, each file written so that a kill at any moment leaves a whole one."""
