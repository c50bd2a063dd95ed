"""What ``sliceout bench`` measures: training steps of one network under several schemes, one process per case.

``cases`` says what can be asked for, ``suites.toml`` which questions belong together, ``work`` builds a network, its
batch and its optimizer, ``floor`` cuts it down to the sliced widths, ``worker`` times it in a process of its own,
``profile`` says there what time and memory were spent on, ``run`` starts the workers, ``files`` keeps the results,
``show`` prints and draws them, ``profile_page`` those of ``profile``, ``page`` writes the document.
"""
