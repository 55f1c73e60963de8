"""The commands of `isopos`, a file each: `Options`, and `run(options, console)`, which returns the exit status.

What does not fit is a ValueError before any work, which names the option: one line for the user, and the exit status 2.
"""
