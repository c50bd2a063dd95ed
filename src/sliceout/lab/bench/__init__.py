"""What ``sliceout bench`` measures: training steps of one network under several schemes, one process per case.

``cases`` says what can be asked for, ``suites.toml`` which questions belong together, ``work`` builds a network, its
batch and its optimizer, ``floor`` cuts it down to the sliced widths, ``worker`` times it in a process of its own,
``run`` starts the workers, ``files`` keeps the results, ``show`` prints and draws them, ``page`` writes the document.
"""
