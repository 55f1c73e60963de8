"""Races against other libraries, outside the wheel: `python -m benchmarks`, with the options of `isopos bench`.

Sections: attention, rotary, load and accuracy; on a GPU attention and rotary.
"""
