"""The reproduction of the paper with SliceOut: data, networks, experiments, training, suites, report pages, the demo.

A package of its own beside the library, which never imports it.
"""
