"""Races against other libraries, which are no part of the wheel: `python -m benchmarks`, with the options of `isopos bench`.

Sections: attention, rotary, load and accuracy, on a GPU attention and rotary. `isopos bench` has the races of ours.
"""
