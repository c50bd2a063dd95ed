"""What ``sliceout-lab bench`` adds to ``sliceout bench``: the paper's networks, suites of cases, profiles, pages.

``suites`` says which cases belong together, ``networks`` builds the paper's, ``worker`` measures one in a process of
its own, ``flops`` and ``profile`` say what its time and memory were spent on, ``prefill`` compiles ahead, ``match``
finds batches of equal memory, ``files`` keeps the results, ``show`` prints and draws them.
"""
