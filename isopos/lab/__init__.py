"""The laboratory: text, training, comparison and reports. It imports isopos and is never imported by it."""
