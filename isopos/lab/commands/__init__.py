"""The commands of the laboratory, a file each."""
