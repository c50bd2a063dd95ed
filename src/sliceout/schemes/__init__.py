"""What the paper compares SliceOut with, and slices of other kinds: a module and its layers each."""
